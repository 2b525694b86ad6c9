"""Meters of a process's tensors that know nothing of workloads or plans."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from itertools import accumulate
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
        live = 0
        for name, change_bytes in _events(self._profiler):
            live += change_bytes
            self.peak_bytes = live if name == "outside meter: begin" else max(self.peak_bytes, live)


class OutsideCudaMeter:
    """The same of a CUDA device: bytes that tensors ask its allocator for.

    A step has to have run before in the process: workspaces of libraries are made once.
    """

    def __init__(self, device: str) -> None:
        self.peak_bytes = 0
        self._device = device
        self._there_bytes = 0

    def begin(self) -> None:
        """From now on peaks count."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def __enter__(self) -> Self:
        gc.collect()
        torch.cuda.synchronize(self._device)
        self._there_bytes = self._asked_for("current")
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self._device)
        self.peak_bytes = self._asked_for("peak") - self._there_bytes

    def _asked_for(self, what: str) -> int:
        return torch.cuda.memory_stats(self._device)[f"requested_bytes.all.{what}"]


def meter_on(device: str) -> OutsideMeter | OutsideCudaMeter:
    """The meter for a device."""
    return OutsideMeter() if device == "cpu" else OutsideCudaMeter(device)


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
        _count_all_threads(True)
        self._profiler.start()

    def end(self) -> None:
        """It ends; without a begin nothing happens."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        _count_all_threads(False)
        running = accumulate((change for _, change in _events(profiler)), initial=self._there_bytes)
        self.peaks_bytes.append(max(running))


def live_tensor_bytes() -> int:
    """Of all CPU tensors that Python can reach, each storage once."""
    kinds = torch.Tensor, torch.nn.Parameter  # Others stand for tensors, or hold some.
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in kinds]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}.values())


def _events(profiler: Any) -> Iterator[tuple[str, int]]:
    """Marks, and by how many bytes the allocator's total changes, in order."""
    before: int | None = None  # Earlier profilers may have left something in the total.
    events = _all_in(profiler.profiler.kineto_results.experimental_event_tree())
    for event in sorted(events, key=lambda event: event.start_time_ns):
        if event.name == "outside meter: begin":
            yield event.name, 0
        elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            now = event.extra_fields.total_allocated
            yield event.name, event.extra_fields.alloc_size if before is None else now - before
            before = now


def _all_in(tree: list[Any]) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _all_in(event.children)


def _count_all_threads(on: bool) -> None:
    """Whether the allocator counts in threads that no profiler watches (CPUAllocator.cpp)."""
    library = next((Path(torch.__file__).parent / "lib").glob("*c10.*"))
    ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage").value = on
