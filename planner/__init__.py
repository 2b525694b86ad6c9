"""The sublinear-memory planner: profile a real PyTorch model, plan under a memory budget, train under the plan.

Public names are resolved when they are first used, so that ``import planner`` loads no torch. What these functions
return beside ``Plan`` and ``Profile`` is in ``planner.results``, what they raise in ``planner.errors``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.hidden_packages import refuse_hidden_packages

refuse_hidden_packages()

from profiler.public_names import lazy_names  # noqa: E402

__version__ = "0.3.0"

if TYPE_CHECKING:
    from planner import errors as errors, results as results, zoo as zoo
    from planner.capacity.advice import advise as advise
    from planner.capacity.batch_search import max_batch as max_batch
    from planner.capacity.rank_advice import advise_rank as advise_rank
    from planner.explain.state_table import model_states as model_states
    from planner.plans.estimating import estimate as estimate
    from planner.plans.offload_request import Offload as Offload
    from planner.plans.pareto_curves import pareto as pareto
    from planner.plans.plan import Plan as Plan
    from planner.plans.profiling import profile as profile
    from planner.plans.refusals import Infeasible as Infeasible
    from planner.plans.rules import Rule as Rule, Rules as Rules
    from planner.plans.solving import solve as solve
    from planner.plans.stated_plan import state as state
    from planner.report.page import write_report as write_report
    from planner.report.snapshot import write_snapshot as write_snapshot
    from planner.runtime.applier import Handle as Handle, apply as apply, handle_of as handle_of, measure as measure
    from planner.training.checkpointing import auto_checkpoint as auto_checkpoint
    from planner.training.training import train_planned as train_planned
    from planner.training.verification import verify as verify
    from profiler.records import Profile as Profile
    from profiler.workload.workload import Workload as Workload

_NAMES = {
    "planner.capacity.advice": "advise",
    "planner.capacity.batch_search": "max_batch",
    "planner.capacity.rank_advice": "advise_rank",
    "planner.explain.state_table": "model_states",
    "planner.plans.estimating": "estimate",
    "planner.plans.offload_request": "Offload",
    "planner.plans.pareto_curves": "pareto",
    "planner.plans.plan": "Plan",
    "planner.plans.profiling": "profile",
    "planner.plans.refusals": "Infeasible",
    "planner.plans.rules": "Rule Rules",
    "planner.plans.solving": "solve",
    "planner.plans.stated_plan": "state",
    "planner.report.page": "write_report",
    "planner.report.snapshot": "write_snapshot",
    "planner.runtime.applier": "Handle apply handle_of measure",
    "planner.training.checkpointing": "auto_checkpoint",
    "planner.training.training": "train_planned",
    "planner.training.verification": "verify",
    "profiler.records": "Profile",
    "profiler.workload.workload": "Workload",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES, submodules=("errors", "results", "zoo"))  # pyright: ignore[reportUnsupportedDunderAll]
