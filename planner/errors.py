"""The errors that the planner raises, each a subclass of ``ValueError`` but for ``Interrupted`` and ``OutOfMemory``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler.public_names import lazy_names

if TYPE_CHECKING:
    from planner.capacity.batch_limits import NoBatch as NoBatch
    from planner.distributed.ranks import RankError as RankError
    from planner.plans.lowering import UnsupportedPlan as UnsupportedPlan
    from planner.plans.plan import Interrupted as Interrupted
    from planner.plans.refusals import Infeasible as Infeasible
    from planner.runtime.plan_checks import PlanMismatch as PlanMismatch
    from planner.training.training import OutOfMemory as OutOfMemory
    from profiler.trace.joint_graph import CaptureError as CaptureError
    from profiler.workload.steps import ProfileError as ProfileError

_NAMES = {
    "planner.capacity.batch_limits": "NoBatch",
    "planner.distributed.ranks": "RankError",
    "planner.plans.lowering": "UnsupportedPlan",
    "planner.plans.plan": "Interrupted",
    "planner.plans.refusals": "Infeasible",
    "planner.runtime.plan_checks": "PlanMismatch",
    "planner.training.training": "OutOfMemory",
    "profiler.trace.joint_graph": "CaptureError",
    "profiler.workload.steps": "ProfileError",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
