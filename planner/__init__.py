"""The sublinear-memory planner: profile a real PyTorch model, plan under a memory budget, train under the plan.

Public names are resolved when they are first used, so that ``import planner`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.capacity.advice import Advice as Advice
    from planner.capacity.advice import advise as advise
    from planner.capacity.batch_limits import Limit as Limit
    from planner.capacity.batch_limits import MaxBatch as MaxBatch
    from planner.capacity.batch_limits import NoBatch as NoBatch
    from planner.capacity.batch_search import max_batch as max_batch
    from planner.capacity.levers import Combination as Combination
    from planner.capacity.levers import Lever as Lever
    from planner.explain.state_table import ModelStates as ModelStates
    from planner.explain.state_table import StateRow as StateRow
    from planner.explain.state_table import model_states as model_states
    from planner.plans.lowering import UnsupportedPlan as UnsupportedPlan
    from planner.plans.offload_request import Offload as Offload
    from planner.plans.pareto_curves import pareto as pareto
    from planner.plans.plan import Plan as Plan
    from planner.plans.plan import PlannedStage as PlannedStage
    from planner.plans.profiling import profile as profile
    from planner.plans.rules import Rule as Rule
    from planner.plans.rules import Rules as Rules
    from planner.plans.solving import Infeasible as Infeasible
    from planner.plans.solving import NothingFound as NothingFound
    from planner.plans.solving import solve as solve
    from planner.plans.stated_plan import state as state
    from planner.runtime.applier import Handle as Handle
    from planner.runtime.applier import PlanMismatch as PlanMismatch
    from planner.runtime.applier import apply as apply
    from planner.runtime.applier import handle_of as handle_of
    from planner.training.checkpointing import auto_checkpoint as auto_checkpoint
    from planner.training.dynamic_shapes import DynamicHandle as DynamicHandle
    from planner.training.input_signatures import Signature as Signature
    from planner.training.oom_report import FailureReport as FailureReport
    from planner.training.oom_report import OutOfMemory as OutOfMemory
    from planner.training.training import TrainingRun as TrainingRun
    from planner.training.training import train_planned as train_planned
    from profiler.measurement.step_measurement import Measurement as Measurement
    from profiler.measurement.step_measurement import measure as measure
    from profiler.recomputation.functions import recompute as recompute
    from profiler.records import Profile as Profile
    from profiler.workload.steps import ProfileError as ProfileError
    from profiler.workload.workload import Workload as Workload

_HOME = {
    "Advice": "planner.capacity.advice",
    "Combination": "planner.capacity.levers",
    "DynamicHandle": "planner.training.dynamic_shapes",
    "FailureReport": "planner.training.oom_report",
    "Handle": "planner.runtime.applier",
    "Infeasible": "planner.plans.solving",
    "Lever": "planner.capacity.levers",
    "Limit": "planner.capacity.batch_limits",
    "MaxBatch": "planner.capacity.batch_limits",
    "Measurement": "profiler.measurement.step_measurement",
    "ModelStates": "planner.explain.state_table",
    "NoBatch": "planner.capacity.batch_limits",
    "NothingFound": "planner.plans.solving",
    "Offload": "planner.plans.offload_request",
    "OutOfMemory": "planner.training.oom_report",
    "Plan": "planner.plans.plan",
    "PlanMismatch": "planner.runtime.applier",
    "PlannedStage": "planner.plans.plan",
    "Profile": "profiler.records",
    "ProfileError": "profiler.workload.steps",
    "Rule": "planner.plans.rules",
    "Rules": "planner.plans.rules",
    "Signature": "planner.training.input_signatures",
    "StateRow": "planner.explain.state_table",
    "TrainingRun": "planner.training.training",
    "UnsupportedPlan": "planner.plans.lowering",
    "Workload": "profiler.workload.workload",
    "advise": "planner.capacity.advice",
    "apply": "planner.runtime.applier",
    "auto_checkpoint": "planner.training.checkpointing",
    "handle_of": "planner.runtime.applier",
    "max_batch": "planner.capacity.batch_search",
    "measure": "profiler.measurement.step_measurement",
    "model_states": "planner.explain.state_table",
    "pareto": "planner.plans.pareto_curves",
    "profile": "planner.plans.profiling",
    "recompute": "profiler.recomputation.functions",
    "solve": "planner.plans.solving",
    "state": "planner.plans.stated_plan",
    "train_planned": "planner.training.training",
}
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "zoo":
        return import_module("planner.zoo")
    if name not in _HOME:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, "zoo"})
