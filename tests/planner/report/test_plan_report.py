"""What a report says of a plan, against the plan: the curve, what is alive at each moment, decisions, levers."""

from __future__ import annotations

import dataclasses

import pytest

import planner
from planner.explain.peak import Peak, PeakPart
from planner.explain.timeline import Timeline
from planner.report.plan_report import MeasuredRun, decision_rows, history_of, op_tables, report_of_plan


@pytest.fixture(scope="module")
def plan(files):
    return planner.Plan.load(files / "plan.json")


@pytest.fixture(scope="module")
def report(plan):
    return report_of_plan(plan)


def moment(**sizes: int) -> Peak:
    parts = tuple(
        PeakPart(what="kept", op=f"aten.{op}.default", stage="h", module="m", size_bytes=size)
        for op, size in sizes.items()
    )
    total = sum(sizes.values())
    return Peak(source="predicted", peak_bytes=total, phase="forward", stage="h", action="forward", parts=parts)


def test_a_history_has_only_what_changes():
    history = history_of([moment(mm=3), moment(mm=3, add=2), moment(add=4)])
    assert history.labels == (("kept", "mm", "h.m"), ("kept", "add", "h.m"))
    assert history.changes == (((0, 3),), ((1, 2),), ((0, 0), (1, 4)))
    assert history.at(1) == {("kept", "mm", "h.m"): 3, ("kept", "add", "h.m"): 2}
    assert history.at(2) == {("kept", "add", "h.m"): 4}


def test_at_every_moment_what_is_alive_adds_up(plan, report):
    assert [step.timeline.planned for step in report.steps] == [False, True]
    for step in report.steps:
        sums = [sum(step.history.at(k).values()) for k in range(len(step.timeline.spans))]
        assert sums == [span.peak_bytes for span in step.timeline.spans]
    assert report.steps[1].timeline.peak.peak_bytes == plan.predicted_peak_bytes == report.peaks[0].peak_bytes
    assert all(sum(row.size_bytes for row in table.rows) == table.peak_bytes for table in report.peaks)
    here = [each for each in report.curve if each.predicted_peak_bytes == plan.predicted_peak_bytes]
    assert [decision_rows(each) for each in here] == [report.decisions]


def test_decisions_of_stages_add_up_to_the_plan(plan, report):
    rows = report.decisions
    assert sum(row.count for row in rows) == len(plan.stages)
    assert sum(row.extra_seconds for row in rows) == pytest.approx(plan.recomputed_seconds)
    assert sum(row.kept_bytes for row in rows) == sum(stage.kept_bytes for stage in plan.stages)
    freed = [row for row in rows if row.freed_bytes]
    assert freed and {row.decision for row in freed} <= {"recompute", "segment", "selective"}
    assert report.ops == op_tables(plan)


def test_the_sentence_says_peak_and_cost(plan, report):
    assert report.sentence.startswith(f"A training step of {plan.model_class} peaks at ")
    assert f"for {plan.slowdown - 1:.0%} more time" in report.sentence
    kept = dataclasses.replace(plan, recomputed_ops=0, predicted_seconds=plan.unplanned_seconds)
    assert report_of_plan(kept).sentence.endswith("for no extra time: everything is kept.")


def test_levers_are_of_the_curve(plan, report):
    smallest = next(row for row in report.levers if row.change.startswith("The smallest budget"))
    assert f"--budget {report.curve[0].predicted_peak_bytes} " in smallest.command
    assert f"{report.curve[0].slowdown:.2f} times" in smallest.effect
    changes = {row.change for row in report_of_plan(dataclasses.replace(plan, no_offload="none here")).levers}
    assert "Offload to host memory" in changes


def test_what_is_measured_stands_beside(plan, report):
    spans = report.steps[1].timeline.spans
    measured = MeasuredRun(
        peak_bytes=2**20, seconds=0.25, unplanned_peak_bytes=2**21, unplanned_seconds=0.125, losses=(2.0, 1.5),
        timelines=(Timeline(source="measured", planned=True, spans=spans),), peak=moment(mm=2**20),
    )  # fmt: skip
    facts = dict(report_of_plan(plan, measured=measured).facts)
    assert facts["Measured peak"].startswith("1.00 MiB")
    assert facts["Measured without"] == "2.00 MiB, 125 ms"
    assert facts["Losses"] == "2, 1.5"


def test_a_plan_of_an_older_release_is_refused(plan):
    with pytest.raises(ValueError, match="lacks the chain"):
        report_of_plan(dataclasses.replace(plan, chain=None))
