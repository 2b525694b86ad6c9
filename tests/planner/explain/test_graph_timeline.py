"""Plans of single ops over a step: every moment and the peak, against the plan's own predictions."""

from __future__ import annotations

import dataclasses
import html
from xml.etree import ElementTree

import pytest

import planner
import planner.zoo
from planner.explain.graph_timeline import RESIDENT, graph_moments, graph_peak, graph_timelines
from planner.explain.peak import KEPT, MADE_AGAIN
from planner.plans.graph_plan import GraphPlan
from profiler.records import LinkRecord
from profiler.step_graph import Side
from profiler.step_replay import alive_during, replay_step, runs_once
from tests.support.step_profiles import chain_step, profile_of


@pytest.fixture(scope="module")
def plan() -> GraphPlan:
    profile = planner.profile(planner.zoo.build("mlp", layers=6, hidden=64, batch=256), graph=True)
    return planner.solve(profile, "90%", gap=0.01)


def test_timelines_reach_the_predicted_peaks(plan: GraphPlan) -> None:
    unplanned, planned = graph_timelines(plan)
    assert planned.peak.peak_bytes == plan.predicted_peak_bytes < unplanned.peak.peak_bytes
    assert planned.seconds >= unplanned.seconds
    assert sum(span.action == "recompute" for span in planned.spans) == plan.recomputed_ops > 0
    assert [phase for phase, *_ in planned.phases()] == ["forward", "backward", "optimizer"]
    for timeline in (unplanned, planned):
        assert all(span.before_bytes <= span.peak_bytes >= span.after_bytes for span in timeline.spans)


def test_a_notebook_shows_what_runs_again_and_the_curve(plan: GraphPlan) -> None:
    text, _, rest = plan._repr_html_().partition("</pre>")
    assert plan.summary().startswith(html.unescape(text).removeprefix("<pre>"))
    table, end, picture = rest.partition("</table>")
    rows = [[cell.text or "" for cell in row] for row in ElementTree.fromstring(table + end).iterfind("tbody/tr")]
    assert sum(int(row[2]) for row in rows) == plan.recomputed_ops
    assert picture == plan.timeline().svg
    polygon, line, _ = ElementTree.fromstring(picture)
    heights = [float(point.split(",")[1]) for point in polygon.attrib["points"].split()]
    highest_bytes = max(span.peak_bytes for span in graph_timelines(plan)[1].spans if span.stage)
    share = (max(heights) - min(heights)) / (max(heights) - float(line.attrib["y1"]))
    assert share == pytest.approx(highest_bytes / plan.budget_bytes, abs=2e-3)  # Points have one decimal.


def test_what_is_alive_adds_up_at_every_run(plan: GraphPlan) -> None:
    held = plan.around.held_bytes > 0
    for runs in (runs_once(plan.graph), plan.runs):
        replayed = replay_step(plan.graph, runs, held=held)
        sides: tuple[Side, ...] = ("forward", "backward")
        for side, ordinals, of_side in zip(sides, runs, (replayed.forward, replayed.backward), strict=True):
            for place, ordinal in enumerate(ordinals):
                during = alive_during(plan.graph, runs, side, place, held=held)
                beside = plan.graph.ops[ordinal].transient_bytes
                assert sum(each.size_bytes for each in during) + beside == of_side.peaks[place]
                after = alive_during(plan.graph, runs, side, place, held=held, after=True)
                assert sum(each.size_bytes for each in after) == of_side.alive[place]


def test_what_waits_in_host_memory_is_not_alive_meanwhile() -> None:
    step = chain_step(layers=8)
    link = LinkRecord(to_host_bytes_per_second=1e9, to_device_bytes_per_second=1e9)
    profile = dataclasses.replace(profile_of(step), link=link)
    plan = planner.solve(profile, profile.unplanned_peak_bytes - 4 * step.storages[1].size_bytes, time_limit_seconds=1)
    assert plan.copies and not plan.recomputed_ops
    unplanned, planned = graph_timelines(plan)
    peak = graph_peak(plan, planned)
    assert planned.peak.peak_bytes == plan.predicted_peak_bytes == sum(part.size_bytes for part in peak.parts)
    assert unplanned.peak.peak_bytes == profile.unplanned_peak_bytes > plan.predicted_peak_bytes
    assert unplanned.seconds == pytest.approx(planned.seconds - plan.stall_seconds)
    replayed = replay_step(step, plan.runs, held=plan.around.held_bytes > 0, copies=plan.copies)
    for place, peak_bytes in enumerate(replayed.backward.peaks):
        held, copies = plan.around.held_bytes > 0, plan.copies
        during = alive_during(step, plan.runs, "backward", place, held=held, copies=copies)
        beside = step.ops[plan.runs.backward[place]].transient_bytes
        assert sum(each.size_bytes for each in during) + beside == peak_bytes


def test_every_run_of_a_step_is_explained(plan: GraphPlan) -> None:
    planned = graph_timelines(plan)[1]
    moments = [*graph_moments(plan, planned)]
    assert [moment.peak_bytes for moment in moments] == [span.peak_bytes for span in planned.spans]
    assert all(sum(part.size_bytes for part in moment.parts) == moment.peak_bytes for moment in moments)
    assert {moment.action for moment in moments} >= {"forward", "recompute", "backward", "loss", "optimizer"}


def test_the_peak_names_its_op_and_what_is_alive(plan: GraphPlan) -> None:
    peak = graph_peak(plan, graph_timelines(plan)[1])
    assert peak.peak_bytes == plan.predicted_peak_bytes == sum(part.size_bytes for part in peak.parts)
    sizes = {part.what: part.size_bytes for part in peak.parts}
    assert sizes[RESIDENT] == plan.resident_bytes
    assert KEPT in sizes
    assert all(part.op and part.stage for part in peak.parts if part.what in (KEPT, MADE_AGAIN))


def test_the_loss_and_the_optimizer_may_be_the_highest(plan: GraphPlan) -> None:
    around = plan.around
    at_loss = dataclasses.replace(plan, around=dataclasses.replace(around, loss_bytes=2**30))
    at_end = dataclasses.replace(plan, around=dataclasses.replace(around, other_peak_bytes=2**31))
    for other, action in ((at_loss, "loss"), (at_end, "optimizer")):
        peak = graph_peak(other, graph_timelines(other)[1])
        assert peak.action == action and sum(part.size_bytes for part in peak.parts) == peak.peak_bytes
