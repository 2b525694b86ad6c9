"""Timelines: one worked out by hand, and the predicted ones against what the plan claims."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import pytest

import planner
from planner.explain.timeline import (
    COLUMNS,
    Span,
    Timeline,
    aligned,
    predicted_timelines,
    seconds_outside_chain_of,
    timeline_table,
)
from planner.plans.plan import chain_in
from solvers import Action, Schedule
from tests.support.small_chain import DROPPED, small_chain, two_stages


def rows_of(timeline: Timeline) -> list[tuple]:
    return [
        (s.phase, s.stage, s.action, s.start_seconds, s.end_seconds, s.before_bytes, s.peak_bytes, s.after_bytes)
        for s in timeline.spans
    ]


def test_a_planned_step_worked_out_by_hand() -> None:
    # The first stage is dropped (10 + 1 stay), the second keeps 4 and returns 1; then the first runs again.
    _, planned = predicted_timelines(two_stages(), DROPPED, seconds_outside_chain=0.5)
    assert rows_of(planned) == [
        ("forward", "first", "forward", 0, 1, 10, 12, 11),
        ("forward", "second", "forward", 1, 2, 11, 17, 16),
        ("forward", "second", "free", 2, 2, 16, 16, 15),
        ("backward", "second", "backward", 2, 4, 15, 16, 11),
        ("backward", "first", "free", 4, 4, 11, 11, 10),
        ("backward", "first", "recompute", 4, 5, 10, 14, 14),
        ("backward", "first", "backward", 5, 7, 14, 15, 10),
        ("optimizer", "", "optimizer", 7, 7.5, 10, 15, 10),
    ]
    assert (planned.series, planned.peak.stage, planned.seconds) == ("predicted_planned", "second", 7.5)
    lanes = {lane.action: lane.seconds for lane in planned.lanes()}
    assert (lanes["forward"], lanes["optimizer"]) == ([(0, 2)], [(7, 7.5)])
    assert sorted([*lanes["recompute"], *lanes["backward"]])[0][0] == 2


def test_a_backward_in_which_ops_run_again_says_what_they_take() -> None:
    chain = two_stages()
    first, second = chain.stages
    (kept,) = second.options
    inside = replace(kept, name="inside", backward_seconds=kept.backward_seconds + 0.75, kept_bytes=0)
    chain = replace(chain, stages=(first, replace(second, options=(kept, inside))))
    actions = [Action("forward", 0, 0), Action("forward", 1, 1), Action("backward", 1), Action("backward", 0)]
    unplanned, planned = predicted_timelines(chain, Schedule(actions=tuple(actions)))
    assert [span.again_seconds for span in planned.spans if span.action == "backward"] == [0.75, 0.0]
    assert not any(span.again_seconds for span in unplanned.spans)


def test_a_stage_that_runs_again_keeping_nothing_runs_in_backward_already() -> None:
    actions = [Action("forward", k) for k in range(3)]
    actions += [Action("free", 0), Action("free", 1), Action("forward", 0), Action("forward", 1), Action("free", 0)]
    actions += [Action("recompute", 2, 0), Action("backward", 2), Action("free", 1), Action("free", 2)]
    actions += [Action("forward", 0), Action("recompute", 1, 0), Action("backward", 1), Action("free", 0)]
    actions += [Action("recompute", 0, 0), Action("backward", 0)]
    chain = replace(small_chain(), stages=small_chain().stages[:3])
    _, planned = predicted_timelines(chain, Schedule(actions=tuple(actions)))
    assert [(s.phase, s.action) for s in planned.spans[3:7]] == [
        ("forward", "free"), ("forward", "free"), ("backward", "recompute"), ("backward", "recompute"),
    ]  # fmt: skip
    assert [s.phase for s in planned.spans] == ["forward"] * 5 + ["backward"] * 13


def test_a_chain_without_an_optimizer_ends_with_its_backward() -> None:
    unplanned, _ = predicted_timelines(replace(two_stages(), optimizer_peak_bytes=0), DROPPED)
    assert unplanned.spans[-1].phase == "backward"
    assert unplanned.series == "predicted_unplanned"


@pytest.fixture
def plan(files) -> planner.Plan:
    return planner.Plan.load(files / "plan.json")


def test_the_predicted_timelines_say_what_the_plan_claims(plan: planner.Plan) -> None:
    chain = chain_in(plan)
    unplanned, planned = predicted_timelines(
        chain, plan.schedule, seconds_outside_chain=seconds_outside_chain_of(plan, chain)
    )
    assert planned.peak.peak_bytes == plan.predicted_peak_bytes
    assert unplanned.peak.peak_bytes == plan.unplanned_peak_bytes
    outside_seconds = plan.unplanned_seconds - chain.unplanned_seconds
    assert planned.seconds == pytest.approx(plan.predicted_seconds + max(0.0, -outside_seconds))


def test_time_goes_on_without_gaps_and_phases_come_in_order(plan: planner.Plan) -> None:
    for timeline in predicted_timelines(chain_in(plan), plan.schedule):
        spans = timeline.spans
        assert all(a.end_seconds == b.start_seconds for a, b in itertools.pairwise(spans))
        assert all(s.before_bytes <= s.peak_bytes >= s.after_bytes for s in spans)
        assert list(dict.fromkeys(span.phase for span in timeline.spans)) == ["forward", "backward", "optimizer"]


def test_the_table_has_a_row_for_every_action(plan: planner.Plan) -> None:
    timelines = predicted_timelines(chain_in(plan), plan.schedule)
    frame = timeline_table(timelines)
    assert tuple(frame.columns) == COLUMNS
    assert list(frame["series"]) == [t.series for t in timelines for _ in t.spans]
    planned = frame[frame["series"] == "predicted_planned"]
    assert max(map(int, planned["bytes_peak"])) == plan.predicted_peak_bytes
    assert list(planned["seconds"]) == [s.end_seconds for s in timelines[1].spans]


def test_a_plan_without_its_chain_or_with_another_one_is_refused(plan: planner.Plan) -> None:
    with pytest.raises(ValueError, match=r"old\.json: .* lacks the chain .* solve the profile"):
        chain_in(replace(plan, chain=None), "old.json")
    with pytest.raises(ValueError, match="does not give the predicted peak"):
        chain_in(replace(plan, predicted_peak_bytes=plan.predicted_peak_bytes + 1))


def test_a_measured_step_is_drawn_action_by_action_where_the_prediction_has_it() -> None:
    """One action that was not predicted lies between its neighbours; slower ones do not push the others away."""

    def step(source: Literal["predicted", "measured"], *spans: tuple[str, float, float]) -> Timeline:
        of = [
            Span(
                phase="forward", stage=stage, action="forward", start_seconds=start, end_seconds=end,
                before_bytes=0, peak_bytes=1, after_bytes=0,
            )
            for stage, start, end in spans
        ]  # fmt: skip
        return Timeline(source=source, planned=True, spans=tuple(of))

    predicted = step("predicted", ("a", 0, 1), ("b", 1, 3), ("b", 3, 4))
    measured = step("measured", ("a", 0, 10), ("gap", 10, 20), ("b", 20, 22), ("b", 22, 30))
    drawn = aligned(measured, predicted)
    assert [(s.start_seconds, s.end_seconds) for s in drawn.spans] == [(0, 1), (1, 1), (1, 3), (3, 4)]
    assert [s.stage for s in drawn.spans] == ["a", "gap", "b", "b"]
    other = step("measured", ("x", 0, 2))
    assert aligned(other, predicted) == other
