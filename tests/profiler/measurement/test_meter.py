"""Meters run from the begin of the forward to the end of the step, and are stopped however it ends."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import planner
from benchmarks.outside_meter import OutsideMeter
from profiler.measurement.meter import Mark, MarkedPhases, memory_meter, metered, metered_step, time_meter
from profiler.records import Phase
from profiler.workload.steps import TensorsOfState
from profiler.workload.workload import StepPhase, Workload
from tests.support.odd_models import workload

CPU = torch.device("cpu")
KIB = 1024


class Listing:
    """A meter that lists what is done with it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, mark: Mark, warm_up: object = None) -> None:
        self.calls.append(mark.phase)

    def mark(self, mark: Mark) -> None:
        self.calls.append(mark.phase)

    def stop(self) -> MarkedPhases:
        self.calls.append("stop")
        return [(Mark("forward"), Phase(seconds=1.0))]


def test_bytes_between_marks_are_those_of_the_allocator() -> None:
    meter, made = memory_meter(CPU, 100), []
    meter.start(Mark("forward"))
    made.append(torch.empty(KIB, dtype=torch.uint8))
    meter.mark(Mark("backward"))
    made.append(torch.empty(4 * KIB, dtype=torch.uint8))
    made.clear()
    assert meter.stop() == [
        (Mark("forward"), Phase(start_bytes=100, peak_bytes=100 + KIB, end_bytes=100 + KIB)),
        (Mark("backward"), Phase(start_bytes=100 + KIB, peak_bytes=100 + 5 * KIB, end_bytes=100)),
    ]


def test_one_phase_is_metered_without_marks() -> None:
    kept = []
    phase = metered(memory_meter(CPU, 0), lambda: kept.append(torch.empty(KIB, dtype=torch.uint8)))
    assert (phase.start_bytes, phase.peak_bytes, phase.end_bytes) == (0, KIB, KIB)
    assert metered(time_meter(CPU), lambda: time.sleep(0.01)).seconds >= 0.01


def test_a_step_is_metered_from_its_forward_on() -> None:
    work, meter = workload("plain"), Listing()
    phases = metered_step(work, meter, Mark, lambda phase, _: meter.mark(Mark(phase)))
    assert meter.calls == ["forward", "backward", "optimizer", "end", "stop"]
    assert phases == [(Mark("forward"), Phase(seconds=1.0))]


@pytest.mark.parametrize(
    ("fails", "calls"),
    [("zero_grad", []), ("forward", ["forward", "stop"]), ("update", ["forward", "backward", "optimizer", "stop"])],
)
def test_a_meter_that_was_started_is_stopped_where_the_step_fails(
    monkeypatch: pytest.MonkeyPatch, fails: str, calls: list[str]
) -> None:
    work, meter = workload("plain"), Listing()

    def fail(*_: object) -> None:
        raise RuntimeError("no room")

    def mark(phase: StepPhase, _: Tensor | None) -> None:
        meter.mark(Mark(phase))

    monkeypatch.setattr(work, fails, fail)
    with pytest.raises(RuntimeError, match="no room"):
        metered_step(work, meter, Mark, mark)
    assert meter.calls == calls


class Remembering(nn.Module):
    """Puts another tensor in an attribute or a buffer in every call, and reads one that somebody else writes to."""

    state: Tensor

    def __init__(self, shared: Tensor, buffer: bool) -> None:
        super().__init__()
        self.inner, self.shared = nn.Linear(32, 32), shared
        if buffer:
            self.register_buffer("state", torch.zeros(64, 32))
        else:
            self.state = torch.zeros(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x) + self.state) * self.shared
        self.state = y.detach().clone()
        return x + y


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.slow
def test_what_modules_let_go_of_in_a_metered_step_is_seen(buffer: bool) -> None:
    outside = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    values = np.ones(32, dtype=np.float32)
    shared = torch.from_numpy(values)
    outside.start()  # Before the model is made: then it sees everything given back.
    model = nn.Sequential(*(Remembering(shared, buffer) for _ in range(4)))
    work = Workload(model=model, inputs=torch.randn(64, 32), loss=lambda output: output.square().mean())
    for _ in range(3):
        work.step()
        work.zero_grad()
    outside.stop()
    results: Any = outside.profiler
    changes = [event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]"]
    expected = max(itertools.accumulate(changes)) + values.nbytes
    for _ in range(2):  # The second finds what the first one left in the profiler's tables.
        assert planner.profile(work, menus=False).unplanned_peak_bytes == expected
        assert planner.measure(work).peak_bytes == expected
    values[:] = 2.0
    assert torch.equal(shared, torch.full((32,), 2.0))


def test_a_meter_that_was_stopped_holds_nothing_of_the_state() -> None:
    model = Remembering(torch.ones(32), buffer=False)
    work = Workload(model=model, inputs=torch.randn(64, 32), loss=lambda output: output.square().mean())
    meter = memory_meter(CPU, 0, TensorsOfState(work))
    stored = weakref.ref(model.state.untyped_storage())
    meter.start(Mark("forward"))
    meter.stop()
    assert model.state.untyped_storage() is stored()
    model.state = torch.zeros(64, 32)
    assert stored() is None


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_memory_that_a_thread_of_a_process_group_gives_back_is_seen(tmp_path: Path) -> None:
    meter = memory_meter(CPU, 0)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with OutsideMeter() as outside:
            given_back_by_a_thread()
        meter.start(Mark("forward"))
        given_back_by_a_thread()
        meter.mark(Mark("backward"))
        phases = meter.stop()
    finally:
        torch.distributed.destroy_process_group()
    assert [(phase.peak_bytes, phase.end_bytes) for _, phase in phases] == [(4000, 0), (0, 0)]
    assert outside.peak_bytes == 4000


def given_back_by_a_thread() -> None:
    """Twice 4000 bytes, one after the other; of the first, it is another thread that lets go."""
    held = [torch.empty(1000)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    torch.empty(1000)
