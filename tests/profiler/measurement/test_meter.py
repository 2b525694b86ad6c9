"""Meters run from the begin of the forward to the end of the step, and are stopped however it ends."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from profiler.measurement.meter import Mark, MarkedPhases, memory_meter, metered, metered_step, time_meter
from profiler.records import Phase
from profiler.workload.workload import StepPhase
from tests.support.odd_models import workload

CPU = torch.device("cpu")
KIB = 1024


class Listing:
    """A meter that lists what is done with it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, mark: Mark) -> None:
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
    phases = metered_step(work, meter, Mark("forward"), lambda phase, _: meter.mark(Mark(phase)))
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
        metered_step(work, meter, Mark("forward"), mark)
    assert meter.calls == calls
