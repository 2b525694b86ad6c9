"""The records that the planner returns, beside ``planner.Plan`` and ``planner.Profile``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler.public_names import lazy_names

if TYPE_CHECKING:
    from planner.capacity.advice import Advice as Advice
    from planner.capacity.batch_limits import Limit as Limit, MaxBatch as MaxBatch
    from planner.capacity.levers import Combination as Combination, Lever as Lever
    from planner.capacity.rank_advice import RankAdvice as RankAdvice
    from planner.explain.state_table import ModelStates as ModelStates, StateRow as StateRow
    from planner.plans.plan import PlannedStage as PlannedStage
    from planner.training.dynamic_shapes import DynamicHandle as DynamicHandle
    from planner.training.oom_report import FailureReport as FailureReport
    from planner.training.signatures import Signature as Signature
    from planner.training.training import TrainingRun as TrainingRun
    from planner.training.verification import Verification as Verification
    from profiler.measurement.step_measurement import Measurement as Measurement

_NAMES = {
    "planner.capacity.advice": "Advice",
    "planner.capacity.batch_limits": "Limit MaxBatch",
    "planner.capacity.levers": "Combination Lever",
    "planner.capacity.rank_advice": "RankAdvice",
    "planner.explain.state_table": "ModelStates StateRow",
    "planner.plans.plan": "PlannedStage",
    "planner.training.dynamic_shapes": "DynamicHandle",
    "planner.training.signatures": "Signature",
    "planner.training.oom_report": "FailureReport",
    "planner.training.training": "TrainingRun",
    "planner.training.verification": "Verification",
    "profiler.measurement.step_measurement": "Measurement",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
