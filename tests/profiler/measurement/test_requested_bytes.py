"""What is counted on CUDA, by counters in place of a device: bytes asked for, and blocks by themselves."""

from __future__ import annotations

import pytest
import torch

import planner
from profiler.measurement import step_measurement
from profiler.measurement.device_memory import held_for, requested_bytes
from profiler.measurement.meter import Mark, memory_meter
from profiler.measurement.step_measurement import allocator_bytes_of
from profiler.records import ResidentBytes
from profiler.workload.steps import gradient_bytes

DEVICE = torch.device("cuda", 0)


class Counters:
    """Of an allocator whose blocks are a multiple of 512 bytes, and whose segments one of 4096."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, counts_requested: bool = True) -> None:
        self.asked: list[int] = []
        self.counts_requested = counts_requested
        self.peaks = [0, 0, 0]
        for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.reset())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def now(self) -> list[int]:
        blocks = sum(-(-size // 512) * 512 for size in self.asked)
        return [sum(self.asked), blocks, -(-blocks // 4096) * 4096]

    def allocate(self, *sizes: int) -> None:
        self.asked += sizes
        self.peaks = [max(pair) for pair in zip(self.peaks, self.now(), strict=True)]

    def free(self, size: int) -> None:
        self.asked.remove(size)

    def reset(self) -> None:
        self.peaks = self.now()

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        requested, blocks, _ = self.now()
        found = {"allocated_bytes.all.current": blocks, "allocated_bytes.all.peak": self.peaks[1]}
        if self.counts_requested:
            found |= {"requested_bytes.all.current": requested, "requested_bytes.all.peak": self.peaks[0]}
        return found | {"requested_bytes.all.allocated": 10**6 if self.counts_requested else 0}

    def memory_allocated(self, device: torch.device) -> int:
        return self.now()[1]

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peaks[1]

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.peaks[2]


def test_a_phase_has_the_bytes_that_tensors_asked_for(monkeypatch):
    counters = Counters(monkeypatch)
    counters.allocate(100, 700)  # 100 of the step, the others of somebody else on the device
    meter = memory_meter(DEVICE, 100)
    meter.start(Mark("forward"))
    counters.allocate(513)
    counters.free(513)
    meter.mark(Mark("backward"))
    counters.allocate(1)
    phases = {mark.phase: phase for mark, phase in meter.stop()}
    assert (phases["forward"].start_bytes, phases["forward"].peak_bytes, phases["forward"].end_bytes) == (100, 613, 100)
    assert (phases["backward"].peak_bytes, phases["backward"].end_bytes) == (101, 101)


def test_blocks_and_segments_are_counted_beside(monkeypatch):
    counters = Counters(monkeypatch)
    counters.allocate(100, 513)
    held = held_for(DEVICE, 613)
    assert held is not None
    assert (held.allocated, held.reserved) == (512 + 1024, 4096)
    assert held_for(torch.device("cpu"), 613) is None


def test_an_allocator_that_does_not_count_requests_is_taken_at_its_blocks(monkeypatch):
    counters = Counters(monkeypatch, counts_requested=False)
    counters.allocate(100)
    assert requested_bytes(DEVICE) == (512, 512)
    held = held_for(DEVICE, 512)
    assert held is not None and held.allocated == 512


@pytest.mark.parametrize(("set_aside_bytes", "others_bytes"), [(0, 64), (64, 0)])
def test_the_allocators_part_is_that_of_a_step_and_what_stays_beside(monkeypatch, set_aside_bytes, others_bytes):
    counters = Counters(monkeypatch)
    counters.allocate(5000)
    counters.free(5000)

    class Step:
        device = DEVICE

        def zero_grad(self) -> None: ...

        def step(self) -> None:
            counters.allocate(64, 100, 513, 32 * 2**20)  # Weights of 100 bytes, and a workspace.
            counters.free(513)

    monkeypatch.setattr(step_measurement, "until_stepped", lambda workload, run: run())
    resident = ResidentBytes(parameters=100, buffers=0, optimizer=0, inputs=0)
    monkeypatch.setattr(step_measurement, "resident_bytes_of", lambda workload: resident)
    rounding = 512 - 64 + 512 - 100 + 1024 - 513
    found = allocator_bytes_of(Step(), set_aside_bytes)  # type: ignore[arg-type]
    assert found == rounding + 32 * 2**20 + others_bytes


def test_gradients_of_before_are_no_part_of_what_stays_beside():
    """They are set aside while a profile is made, and stay on the device."""
    model = torch.nn.Linear(4, 4)
    workload = planner.Workload(model=model, inputs=torch.randn(2, 4), loss=torch.sum)
    workload.step()
    assert gradient_bytes(workload) == (16 + 4) * 4
