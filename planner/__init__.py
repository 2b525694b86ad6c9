"""The sublinear-memory planner: profile a real PyTorch model, plan under a memory budget, train under the plan."""

from planner.capacity.advice import Advice, advise
from planner.capacity.batch_limits import Limit, MaxBatch, NoBatch
from planner.capacity.batch_search import max_batch
from planner.capacity.levers import Combination, Lever
from planner.explain.state_table import ModelStates, StateRow, model_states
from planner.plans.lowering import UnsupportedPlan
from planner.plans.offload_request import Offload
from planner.plans.pareto_curves import pareto
from planner.plans.plan import Plan, PlannedStage
from planner.plans.profiling import profile
from planner.plans.rules import Rule, Rules
from planner.plans.solving import Infeasible, NothingFound, solve
from planner.plans.stated_plan import state
from planner.runtime.applier import Handle, PlanMismatch, apply, handle_of
from planner.training.checkpointing import auto_checkpoint
from planner.training.dynamic_shapes import DynamicHandle
from planner.training.input_signatures import Signature
from planner.training.oom_report import FailureReport, OutOfMemory
from planner.training.training import TrainingRun, train_planned
from profiler.measurement.step_measurement import Measurement, measure
from profiler.recomputation.functions import recompute
from profiler.records import Profile
from profiler.workload.steps import ProfileError
from profiler.workload.workload import Workload

__all__ = [
    "Advice",
    "Combination",
    "DynamicHandle",
    "FailureReport",
    "Handle",
    "Infeasible",
    "Lever",
    "Limit",
    "MaxBatch",
    "Measurement",
    "ModelStates",
    "NoBatch",
    "NothingFound",
    "Offload",
    "OutOfMemory",
    "Plan",
    "PlanMismatch",
    "PlannedStage",
    "Profile",
    "ProfileError",
    "Rule",
    "Rules",
    "Signature",
    "StateRow",
    "TrainingRun",
    "UnsupportedPlan",
    "Workload",
    "advise",
    "apply",
    "auto_checkpoint",
    "handle_of",
    "max_batch",
    "measure",
    "model_states",
    "pareto",
    "profile",
    "recompute",
    "solve",
    "state",
    "train_planned",
]
