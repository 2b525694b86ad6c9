"""Measures one training step of a real PyTorch model: the bytes and seconds of each of its stages, as a profile.

Public names are resolved when they are first used, so that ``import profiler`` loads no torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from profiler.public_names import lazy_names

if TYPE_CHECKING:
    from profiler.measurement.profiling import profile as profile
    from profiler.measurement.step_measurement import Measurement as Measurement, measure as measure
    from profiler.records import Profile as Profile
    from profiler.workload.steps import ProfileError as ProfileError
    from profiler.workload.workload import Workload as Workload

# torch's profiler, by which the CPU's memory is metered, logs two lines to stderr whenever it runs.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

_NAMES = {
    "profiler.measurement.profiling": "profile",
    "profiler.measurement.step_measurement": "Measurement measure",
    "profiler.records": "Profile",
    "profiler.workload.steps": "ProfileError",
    "profiler.workload.workload": "Workload",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
