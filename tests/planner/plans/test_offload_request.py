"""Offload as users ask for it: requests, links, plans and files, the command line, and what is shown of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import planner
from planner import Offload, zoo
from planner.explain.peak import predicted_peak
from planner.explain.timeline import predicted_timelines
from planner.explain.timeline_plot import timeline_figure
from planner.plans.cost_model import chain_of
from planner.plans.offload_request import (
    SMALLEST_OFFLOAD_UNIT_BYTES,
    input_offload_units,
    kept_offload_unit_bytes,
    kept_offload_units,
    link_document,
    link_from,
    usable_link,
)
from profiler.device_record import LinkRecord
from profiler.records import Profile
from solvers import Link
from tests.support.command_line import done, refused

RECORD = LinkRecord(
    to_host_bytes_per_second=8e9, to_device_bytes_per_second=16e9, latency_seconds=1e-5, devices=4, host_bytes=1000
)
FAST = Offload(link_gbps=100)


@pytest.fixture(scope="module")
def file(blocks: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("offload") / "profile.json"
    blocks.save(path)
    return path


# Requests --------------------------------------------------------------------------


def test_devices_on_one_link_have_equal_parts_of_it() -> None:
    link = Offload().link(RECORD)
    assert link == Link(
        to_host_bytes_per_second=2e9, to_device_bytes_per_second=4e9, latency_seconds=1e-5, host_bytes=1000
    )


def test_what_is_given_overrules_what_was_measured() -> None:
    link = Offload(link_gbps=6, devices_per_link=2, host_memory="3KiB").link(RECORD)
    assert link == Link(
        to_host_bytes_per_second=3e9, to_device_bytes_per_second=3e9, latency_seconds=1e-5, host_bytes=3072
    )
    assert Offload(mode="never", link_gbps=6).link(RECORD) is None and Offload().link(None) is None
    unlimited = Offload(link_gbps=math.inf).link(None)
    assert unlimited is not None and unlimited.usable and unlimited.host_bytes is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "perhaps"}, "auto, never, only"),
        ({"link_gbps": -1.0}, "not negative"),
        ({"link_gbps": math.nan}, "not negative"),
        ({"devices_per_link": 0}, "at least one device"),
        ({"host_memory": "plenty"}, "expected a size"),
    ],
)
def test_impossible_requests_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Offload(**wrong)


def test_where_nothing_can_be_sent_the_plan_does_without_and_says_why(blocks: Profile) -> None:
    chain = chain_of(blocks)
    assert usable_link(Offload(), chain, None) == (None, "")  # nothing was asked for
    for offload_request, why in [
        (Offload(link_gbps=0), "speed is 0"),
        (Offload(link_gbps=1, host_memory="1KiB"), "not even the smallest tensor"),
        (Offload(link_gbps=1, host_memory=0), "not even the smallest tensor"),
        (Offload(host_memory="1GiB"), "no link to host memory"),
    ]:
        link, reason = usable_link(offload_request, chain, None)
        assert link is None and why in reason
        with pytest.raises(ValueError, match=why):
            usable_link(replace(offload_request, mode="only"), chain, None)
    plan = planner.solve(blocks, "80%", offload=Offload(link_gbps=0))
    assert plan.link is None and "speed is 0" in plan.no_offload
    assert plan.schedule == planner.solve(blocks, "80%", offload="never").schedule


def test_a_chain_without_units_cannot_send() -> None:
    profile = planner.profile(zoo.build("mlp", layers=2, hidden=16), menus=False)
    bare = replace(chain_of(profile))
    bare = replace(bare, stages=tuple(replace(stage, offload_units=()) for stage in bare.stages))
    assert "profile with menus" in usable_link(FAST, bare, None)[1]


def test_a_link_survives_its_file() -> None:
    for link in (None, FAST.link(None), Offload(link_gbps=math.inf, host_memory=5).link(None)):
        assert link_from(json.loads(json.dumps(link_document(link)))) == link


# Offload units ---------------------------------------------------------------------------


def test_units_are_what_a_stage_holds_for_itself_alone(blocks: Profile) -> None:
    for k, record in enumerate(blocks.stages):
        numbers = kept_offload_units(blocks, k)
        if record.menu < 0:
            assert numbers == ()
            continue
        storages = blocks.menus[record.menu].ops.storages
        chosen = [storages[number] for number in numbers]
        assert all(s.saved and not s.returned and s.size_bytes >= SMALLEST_OFFLOAD_UNIT_BYTES for s in chosen)
        assert all(s.dies_after_stage for s in chosen if s.op < 0)
        inputs = sum(s.size_bytes for s in chosen if s.op < 0)
        assert sum(kept_offload_unit_bytes(blocks, k)) - inputs <= record.kept_bytes
        assert bool(input_offload_units(blocks, k)) <= bool(record.links)


def test_nothing_that_a_program_hands_over_is_a_unit(blocks: Profile) -> None:
    for stage in chain_of(blocks).stages:
        assert all(option.offload_units == () for option in stage.options[1:])
    assert any(len(stage.options) > 1 and stage.options[0].offload_units for stage in chain_of(blocks).stages)


# Plans -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(blocks: Profile) -> planner.Plan:
    return planner.solve(blocks, "75%", offload=FAST)


def test_a_plan_says_what_it_sends(plan: planner.Plan, tmp_path: Path) -> None:
    sent = [action for action in plan.schedule.actions if action.kind == "send"]
    assert sent and plan.predicted_peak_bytes <= plan.budget_bytes and not plan.no_offload
    assert 0 < plan.host_bytes <= sum(stage.offloaded_bytes for stage in plan.stages)
    assert all((stage.offloaded_bytes > 0) == (k in {a.stage for a in sent}) for k, stage in enumerate(plan.stages))
    assert any(stage.decision == "offload" for stage in plan.stages if stage.offloaded_bytes) or any(
        stage.decision in ("selective", "recompute") for stage in plan.stages if stage.offloaded_bytes
    )
    plan.save(tmp_path / "plan.json")
    assert planner.Plan.load(tmp_path / "plan.json") == plan


def test_offload_alone_recomputes_nothing(blocks: Profile) -> None:
    plan = planner.solve(blocks, "75%", offload=replace(FAST, mode="only"))
    assert plan.recomputed_ops == 0 and plan.host_bytes > 0
    with pytest.raises(ValueError, match="leave the solver out"):
        planner.solve(blocks, "75%", solver="rotor", offload=replace(FAST, mode="only"))


@pytest.mark.slow
def test_the_host_s_limit_is_kept(blocks: Profile, plan: planner.Plan) -> None:
    for limit in (plan.host_bytes, plan.host_bytes // 2, SMALLEST_OFFLOAD_UNIT_BYTES * 2):
        tight = planner.solve(blocks, "75%", offload=replace(FAST, host_memory=limit))
        assert tight.host_bytes <= limit and tight.predicted_peak_bytes <= tight.budget_bytes


def test_the_peak_s_parts_leave_out_what_is_away(plan: planner.Plan) -> None:
    assert plan.chain is not None
    timeline = predicted_timelines(plan.chain, plan.schedule, link=plan.link)[1]
    for named in (plan, None):  # with the names of storages, and without
        peak = predicted_peak(plan.chain, plan.schedule, timeline, plan=named)
        assert sum(part.size_bytes for part in peak.parts) == peak.peak_bytes == plan.predicted_peak_bytes


def test_copies_stand_beside_the_computation(blocks: Profile) -> None:
    plan = planner.solve(blocks, "75%", offload=Offload(mode="only", link_gbps=0.01))
    assert plan.chain is not None and plan.stall_seconds > 0
    timelines = predicted_timelines(plan.chain, plan.schedule, link=plan.link)
    assert not timelines[0].copies and len(timelines[1].copies) == 2 * sum(
        action.kind == "send" for action in plan.schedule.actions
    )
    assert sum(span.stall_seconds for span in timelines[1].spans) == pytest.approx(plan.stall_seconds)
    figure = timeline_figure(timelines, budget_bytes=plan.budget_bytes)
    engines = next(axes for axes in figure.axes if [t.get_text() for t in axes.get_yticklabels()][:1] == ["compute"])
    bars = {str(bar.get_label()): bar for bar in engines.collections}
    waits = [path.get_extents().width for path in bars["waits for a copy"].get_paths()]
    assert sum(waits) == pytest.approx(1e3 * plan.stall_seconds)
    without = timeline_figure(timelines[:1], budget_bytes=plan.budget_bytes)
    rows = [[label.get_text() for label in axes.get_yticklabels()] for axes in (without.axes[1], engines)]
    assert rows == [["compute"], ["compute", "to host", "to device"]]


# The command line ------------------------------------------------------------------


@pytest.mark.slow
def test_flags_say_what_may_travel(file: Path) -> None:
    solve = ("solve", file, "--budget", "75%", "--json")
    document = json.loads(done(*solve, "--offload", "gbps=100,devices=2").stdout)
    assert document["link"]["to_host_bytes_per_second"] == 50e9
    assert document["host_bytes"] > 0 and any(stage["offloaded_bytes"] for stage in document["stages"])
    without = json.loads(done(*solve, "--link-gbps", "100", "--no-offload").stdout)
    assert without["link"] is None and without["host_bytes"] == 0
    assert json.loads(done(*solve, "--offload", "no").stdout)["link"] is None
    only = json.loads(done(*solve, "--link-gbps", "100", "--offload-only", "--host-memory", "1GiB").stdout)
    assert only["recomputed_ops"] == 0 and only["solver"] == "offload_only"
    zero = done(*solve, "--offload", "gbps=0")
    assert "speed is 0" in json.loads(zero.stdout)["no_offload"] and "speed is 0" in zero.stderr


@pytest.mark.slow
def test_the_report_says_it_in_words(file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    text = done("solve", file, "--budget", "75%", "--offload", "gbps=100", "-o", plan).output
    assert "on the host at once" in text and "100 GB/s" in text and "sent to" in text
    picture, table = tmp_path / "t.png", tmp_path / "t.csv"
    done("show", plan, "-o", picture, "-o", table)
    assert picture.stat().st_size > 0 and ",fetch," in table.read_text()


@pytest.mark.slow
def test_curves_over_a_link_stand_beside_those_that_recompute(file: Path, tmp_path: Path) -> None:
    table, picture = tmp_path / "p.csv", tmp_path / "p.png"
    done("pareto", file, "--offload", "gbps=100", "--csv", table, "-o", picture)
    frame = pd.read_csv(table)
    assert {"offload_only", "auto", "rotor"} <= set(frame["solver"]) and picture.stat().st_size > 0
    assert "offload_only" not in set(planner.pareto(file)["solver"])
    rows = frame.to_dict("records")
    bounds = [(row["budget_bytes"], row["lower_bound_seconds"]) for row in rows if row["solver"] == "lower_bound"]
    for row in (row for row in rows if row["solver"] == "auto"):
        proven = [seconds for budget, seconds in bounds if budget >= row["peak_bytes"]]
        assert row["seconds"] >= max(proven, default=0.0) * (1 - 1e-9)
    assert "speed is 0" in done("pareto", file, "--offload", "gbps=0").stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-offload", "--offload-only"], "they contradict each other"),
        (["--offload-only"], "no link to host memory"),
        (["--link-gbps", "-1"], "a number greater than or equal to 0"),
        (["--devices-per-link", "0"], "a number greater than or equal to 1"),
        (["--host-memory", "much"], "expected a size"),
        (["--offload", "no,only"], "each once and joined by commas"),
        (["--offload", "never"], "expected no, auto, only, gbps=G"),
        (["--offload", "gbps=fast"], "expected a number after gbps=, got 'fast'"),
        (["--offload", "gbps=-1"], "--offload: expected gigabytes per second, not negative"),
        (["--offload", "no", "--offload-only"], "each once"),
    ],
)
def test_wrong_flags_are_refused(file: Path, flags: list[str], said: str) -> None:
    assert said in refused("solve", file, "--budget", "75%", *flags)
