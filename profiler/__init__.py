"""Measures one training step of a real PyTorch model: the bytes and seconds of each of its stages, as a profile.

Public names are resolved when they are first used, so that ``import profiler`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profiler.measurement.profiling import profile as profile
    from profiler.measurement.step_measurement import Measurement as Measurement, measure as measure
    from profiler.recomputation.functions import recompute as recompute
    from profiler.records import Profile as Profile
    from profiler.workload.steps import ProfileError as ProfileError
    from profiler.workload.workload import Workload as Workload

_NAMES = {
    "profiler.measurement.profiling": "profile",
    "profiler.measurement.step_measurement": "Measurement measure",
    "profiler.recomputation.functions": "recompute",
    "profiler.records": "Profile",
    "profiler.workload.steps": "ProfileError",
    "profiler.workload.workload": "Workload",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'profiler' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
