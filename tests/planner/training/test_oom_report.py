"""What is said of memory that ran out: place, numbers, the last actions, and what comes next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import planner
from planner import zoo
from planner.explain.timeline import PhaseName, Span, Timeline, predicted_timelines
from planner.training.oom_recovery import _beside, _predicted_at
from planner.training.oom_report import ActionMemory, FailureReport, allocation_in, failure_text
from planner.training.training import OutOfMemory


@pytest.fixture(scope="module")
def plan():
    return planner.solve(planner.profile(zoo.build("mlp", layers=4, hidden=16, batch=512)), "90%")


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1.00 GiB", 20 * 2**20),
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0", 512),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes. Error code 12", 80),
        ("out of memory", None),
    ],
)
def test_the_refused_allocation_is_read_from_the_message(message, size):
    assert allocation_in(message) == size


def span(stage: str, peak_bytes: int, *, action: Any = "recompute", phase: PhaseName = "backward") -> Span:
    sizes = {"before_bytes": 0, "peak_bytes": peak_bytes, "after_bytes": 0}
    return Span(phase=phase, stage=stage, action=action, start_seconds=0.0, end_seconds=0.0, **sizes)


def test_what_was_alive_stands_beside_what_was_predicted_of_the_same_run():
    """A stage that runs again and again has another prediction each time; one run may be measured in stretches."""
    predicted = (span("a", 10), span("b", 20), span("a", 30), span("a", 5, action="backward"))
    measured = [span("a", 3), span("a", 9), span("a", 4), span("b", 21), span("a", 31), span("c", 7)]
    found = _beside(measured, Timeline(source="predicted", planned=True, spans=predicted))
    assert [(row.stage, row.predicted_bytes, row.actual_bytes) for row in found] == [
        ("a", 10, 9),
        ("b", 20, 21),
        ("a", 30, 31),
        ("c", None, 7),
    ]


def test_where_nothing_was_measured_the_most_that_is_predicted_of_the_place_counts(plan):
    chain = plan.chain
    assert chain is not None
    spans = predicted_timelines(chain, plan.schedule)[1].spans
    assert max(_predicted_at(plan, s.phase, s.stage) or 0 for s in spans) == plan.predicted_peak_bytes
    assert all((_predicted_at(plan, s.phase, s.stage) or 0) >= s.peak_bytes for s in spans)


def test_the_report_has_the_last_actions_and_each_number_at_its_place():
    rows = [
        ActionMemory(phase="forward", stage=f"s{k}", action="forward", predicted_bytes=k, actual_bytes=k)
        for k in range(7)
    ]
    last = ActionMemory(phase="backward", stage="a", action="recompute", predicted_bytes=2**20, actual_bytes=2**21)
    report = FailureReport(
        step=3,
        phase="backward",
        stage="a",
        predicted_bytes=990,
        actual_bytes=991,
        allocation_bytes=992,
        message="out of memory",
        timeline=(*rows, last),
        repeated=True,
        restored=True,
        budget_bytes=993,
        headroom_bytes=994,
        predicted_peak_bytes=995,
        next_budget_bytes=996,
    )
    lines = [" ".join(line.split()) for line in failure_text(report).splitlines()]
    assert lines[:4] == [
        "step 3, backward, 'a' running again: out of memory",
        "really alive there 991 B (991 bytes); another 992 B (992 bytes) was refused",
        "predicted there 990 B (990 bytes); at the peak 995 B (995 bytes)",
        "budget 993 B (993 bytes), 994 B (994 bytes) of it headroom",
    ]
    assert lines[5:11] == [
        *(f"forward of 's{k}' {k} B predicted {k} B alive" for k in range(2, 7)),
        "backward, 'a' running again 1.00 MiB predicted 2.00 MiB alive",
    ]
    assert "nothing was lost" in lines[11] and lines[12:] == ["trying again with a plan for 996 B (996 bytes)"]
    gone = replace(report, repeated=False, restored=False, next_budget_bytes=None, why_not="because")
    lines = failure_text(gone).splitlines()
    assert lines[4] == "run once more under a meter, the step did not fail" and lines[6:] == ["because"]
    assert "load a checkpoint" in lines[5]
    assert str(OutOfMemory([gone, report], [])) == failure_text(report)
