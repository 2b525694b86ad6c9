"""A meter of a process's tensors that knows nothing of steps, workloads or plans."""

from __future__ import annotations

import gc
from typing import Any, Self

import torch


class OutsideMeter:
    """Counts every byte that the CPU's allocator hands out inside of it, as a context manager.

    Whatever is to be counted has to be made inside.

    Attributes:
        peak_bytes: the most at once since ``begin``, what was there then included; known on leaving.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profiler: Any = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def begin(self) -> None:
        """From now on peaks count: weights that are drawn or loaded take more for a moment."""
        with torch.profiler.record_function("outside meter: begin"):
            pass

    def __enter__(self) -> Self:
        gc.collect()  # What goes inside was made inside.
        self._profiler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._profiler.stop()
        live = 0
        for event in sorted(self._profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "outside meter: begin":
                self.peak_bytes = live
            elif event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
                live += event.nbytes()
                self.peak_bytes = max(self.peak_bytes, live)
