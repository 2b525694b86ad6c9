"""A meter of a process's tensors that knows nothing of steps, workloads or plans."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch


class OutsideMeter:
    """Counts every byte that the CPU's allocator hands out inside of it, as a context manager.

    Whatever is to be counted has to be made inside. The allocator's own total counts, since the profiler tells nothing
    of memory that another thread gives back, as gloo's do.

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
        _count_all_threads(True)
        self._profiler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._profiler.stop()
        _count_all_threads(False)
        events = _all_in(self._profiler.profiler.kineto_results.experimental_event_tree())
        live, before = 0, None
        for event in sorted(events, key=lambda event: event.start_time_ns):
            if event.name == "outside meter: begin":
                self.peak_bytes = live
            elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
                if before is None:  # Earlier profilers may have left something in the total.
                    before = event.extra_fields.total_allocated - event.extra_fields.alloc_size
                live = event.extra_fields.total_allocated - before
                self.peak_bytes = max(self.peak_bytes, live)


def _all_in(tree: list[Any]) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _all_in(event.children)


def _count_all_threads(on: bool) -> None:
    """Whether the allocator counts in threads that no profiler watches (CPUAllocator.cpp)."""
    library = next((Path(torch.__file__).parent / "lib").glob("*c10.*"))
    ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage").value = on
