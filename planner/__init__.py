"""The sublinear-memory planner: profile a real PyTorch model, plan under a memory budget, train under the plan.

Public names are resolved when they are first used, so that ``import planner`` loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.hidden_packages import refuse_hidden_packages

refuse_hidden_packages()

from profiler.public_names import lazy_names  # noqa: E402

__version__ = "0.2.0"

if TYPE_CHECKING:
    from planner.capacity.advice import Advice as Advice, advise as advise
    from planner.capacity.batch_limits import Limit as Limit, MaxBatch as MaxBatch, NoBatch as NoBatch
    from planner.capacity.batch_search import max_batch as max_batch
    from planner.capacity.levers import Combination as Combination, Lever as Lever
    from planner.capacity.rank_advice import RankAdvice as RankAdvice, advise_rank as advise_rank
    from planner.distributed.collective import apply as apply, measure as measure, profile as profile
    from planner.distributed.rank_failures import RankError as RankError
    from planner.distributed.solving import solve as solve
    from planner.explain.state_table import (
        ModelStates as ModelStates,
        StateRow as StateRow,
        model_states as model_states,
    )
    from planner.plans.lowering import UnsupportedPlan as UnsupportedPlan
    from planner.plans.offload_request import Offload as Offload
    from planner.plans.pareto_curves import pareto as pareto
    from planner.plans.plan import Plan as Plan, PlannedStage as PlannedStage
    from planner.plans.plan_claims import Interrupted as Interrupted
    from planner.plans.refusals import Infeasible as Infeasible, NothingFound as NothingFound
    from planner.plans.rules import Rule as Rule, Rules as Rules
    from planner.plans.stated_plan import state as state
    from planner.report.page import write_report as write_report
    from planner.report.snapshot import write_snapshot as write_snapshot
    from planner.runtime.applier import Handle as Handle, handle_of as handle_of
    from planner.runtime.model_match import PlanMismatch as PlanMismatch
    from planner.training.checkpointing import auto_checkpoint as auto_checkpoint
    from planner.training.dynamic_shapes import DynamicHandle as DynamicHandle
    from planner.training.input_signatures import Signature as Signature
    from planner.training.oom_report import FailureReport as FailureReport
    from planner.training.training import (
        OutOfMemory as OutOfMemory,
        TrainingRun as TrainingRun,
        train_planned as train_planned,
    )
    from planner.training.verification import Verification as Verification, verify as verify
    from profiler.capture.joint_graph import CaptureError as CaptureError
    from profiler.measurement.step_measurement import Measurement as Measurement
    from profiler.records import Profile as Profile
    from profiler.workload.steps import ProfileError as ProfileError
    from profiler.workload.workload import Workload as Workload

_NAMES = {
    "planner.capacity.advice": "Advice advise",
    "planner.capacity.batch_limits": "Limit MaxBatch NoBatch",
    "planner.capacity.batch_search": "max_batch",
    "planner.capacity.levers": "Combination Lever",
    "planner.capacity.rank_advice": "RankAdvice advise_rank",
    "planner.distributed.collective": "apply measure profile",
    "planner.distributed.rank_failures": "RankError",
    "planner.distributed.solving": "solve",
    "planner.explain.state_table": "ModelStates StateRow model_states",
    "planner.plans.lowering": "UnsupportedPlan",
    "planner.plans.offload_request": "Offload",
    "planner.plans.pareto_curves": "pareto",
    "planner.plans.plan": "Plan PlannedStage",
    "planner.plans.plan_claims": "Interrupted",
    "planner.plans.rules": "Rule Rules",
    "planner.plans.refusals": "Infeasible NothingFound",
    "planner.plans.stated_plan": "state",
    "planner.report.page": "write_report",
    "planner.report.snapshot": "write_snapshot",
    "planner.runtime.applier": "Handle handle_of",
    "planner.runtime.model_match": "PlanMismatch",
    "planner.training.checkpointing": "auto_checkpoint",
    "planner.training.dynamic_shapes": "DynamicHandle",
    "planner.training.input_signatures": "Signature",
    "planner.training.oom_report": "FailureReport",
    "planner.training.training": "OutOfMemory TrainingRun train_planned",
    "planner.training.verification": "Verification verify",
    "profiler.measurement.step_measurement": "Measurement",
    "profiler.capture.joint_graph": "CaptureError",
    "profiler.records": "Profile",
    "profiler.workload.steps": "ProfileError",
    "profiler.workload.workload": "Workload",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES, submodules=("zoo",))  # pyright: ignore[reportUnsupportedDunderAll]
