"""Meters of a process's tensors that know nothing of workloads or plans."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import accumulate
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
        for name, size_bytes in _events(self._profiler):
            live += size_bytes
            self.peak_bytes = live if name == "outside meter: begin" else max(self.peak_bytes, live)


class StepPeaks:
    """Peaks of single steps in the midst of a run that meters something itself between them, as planning does.

    What is there as a step begins is counted by the tensors that Python's garbage collector knows: no graph must be
    alive then. Of what goes of that within the step nothing is told, so peaks err upwards by as much.

    Attributes:
        peaks_bytes: of each step, what was there then included.
    """

    def __init__(self) -> None:
        self.peaks_bytes: list[int] = []
        self._there_bytes = 0
        self._profiler: Any = None

    def begin(self) -> None:
        """A step begins."""
        gc.collect()
        self._there_bytes = live_tensor_bytes()
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()

    def end(self) -> None:
        """It ends; without a begin nothing happens."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        running = accumulate((size for _, size in _events(profiler)), initial=self._there_bytes)
        self.peaks_bytes.append(max(running))


def live_tensor_bytes() -> int:
    """Of all CPU tensors that Python can reach, each storage once."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu"]
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in found)}.values())


def _events(profiler: Any) -> Iterator[tuple[str, int]]:
    """What the allocator did, in order: bytes, negative where they went; and marks, of no bytes."""
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "outside meter: begin":
            yield event.name(), 0
        elif event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            yield event.name(), event.nbytes()
