"""Headroom: parsed, taken off the budget, named in plan, document and refusal; 0 unless it is asked for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import planner
from planner import zoo
from planner.plans.headroom import headroom_from
from tests.support.command_line import done, refused, run

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "held"), [("0", 0), (0, 0), ("64", 64), (64, 64), ("1KiB", 1024), ("5%", 50), ("0.05%", 1), ("0%", 0)]
)
def test_it_is_bytes_or_a_share_of_the_budget(text, held):
    assert headroom_from(text).of(1000) == held


@pytest.mark.parametrize("text", ["100%", "150%", "-1", "lots", "", "1.5", "5 percent"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="headroom: .* is neither bytes nor a share"):
        headroom_from(text)


def test_auto_is_what_the_allocator_took_as_it_was_profiled(blocks):
    on_device = replace(blocks, device="cuda:0", allocator_bytes=4096)
    assert headroom_from("auto", on_device).of(10**6) == 4096
    assert headroom_from("auto", blocks).of(10**6) == 0
    plan = planner.solve(on_device, on_device.unplanned_peak_bytes, headroom="auto", offload="never")
    assert plan.headroom_bytes == 4096
    assert plan.predicted_peak_bytes <= on_device.unplanned_peak_bytes - 4096


def test_auto_is_refused_where_nothing_showed_it(blocks):
    with pytest.raises(ValueError, match="does not say what the allocator takes"):
        headroom_from("auto", replace(blocks, device="cuda:0"))
    with pytest.raises(ValueError, match="'auto' is neither .* or auto where one profile is planned"):
        headroom_from("auto")


@pytest.mark.parametrize("text", ["0", "7", "10%", "33.3%", "99.9%"])
def test_the_smallest_budget_around_a_plan_is_the_smallest(text):
    headroom = headroom_from(text)
    for planned in (1, 2, 9, 900, 12345):
        budget = headroom.budget_above(planned)
        assert budget - headroom.of(budget) >= planned
        assert budget - 1 - headroom.of(budget - 1) < planned


def test_a_plan_leaves_it_free_and_names_it(blocks):
    budget = blocks.unplanned_peak_bytes
    plan = planner.solve(blocks, budget, headroom="20%")
    assert plan.budget_bytes == budget
    assert plan.headroom_bytes == -(-budget // 5)
    assert plan.predicted_peak_bytes <= budget - plan.headroom_bytes
    inside = planner.solve(blocks, budget - plan.headroom_bytes)
    assert inside.headroom_bytes == 0
    assert (inside.schedule, inside.predicted_peak_bytes) == (plan.schedule, plan.predicted_peak_bytes)


@pytest.mark.slow
def test_a_refusal_names_the_budget_that_is_enough_with_it(blocks):
    with pytest.raises(planner.Infeasible) as bare:
        planner.solve(blocks, 1)
    with pytest.raises(planner.Infeasible, match="is headroom") as refusal:
        planner.solve(blocks, bare.value.minimum_budget_bytes, headroom="10%")
    least = refusal.value.minimum_budget_bytes
    assert least > bare.value.minimum_budget_bytes
    plan = planner.solve(blocks, least, headroom="10%")
    assert plan.budget_bytes == least
    assert least - plan.headroom_bytes == bare.value.minimum_budget_bytes  # and no more than that beside it


def test_a_headroom_as_large_as_the_budget_is_refused(blocks):
    with pytest.raises(ValueError, match="headroom: 1000 bytes leave nothing of the budget of 1000 bytes"):
        planner.solve(blocks, 1000, headroom=1000)


def test_a_stated_plan_has_it_too(blocks):
    rules = planner.Rules(checkpoints=["transformer.h.1"])
    bare = planner.state(blocks, rules)
    roomy = planner.state(blocks, rules, headroom=MIB)
    assert (roomy.budget_bytes, roomy.headroom_bytes) == (bare.budget_bytes + MIB, MIB)
    with pytest.raises(planner.Infeasible):
        planner.state(blocks, rules, budget=bare.budget_bytes, headroom=1)


def test_the_command_line_takes_prints_and_stores_it(files, tmp_path):
    args = ("solve", files / "profile.json", "--budget", "95%", "--headroom", "4%")
    document = json.loads(done(*args, "-o", tmp_path / "plan.json", "--json").stdout)
    plan = planner.Plan.load(tmp_path / "plan.json")
    assert document["headroom_bytes"] == plan.headroom_bytes > 0
    assert plan.predicted_peak_bytes + plan.headroom_bytes <= plan.budget_bytes
    assert "headroom" in done(*args).stdout
    assert "headroom" not in done(*args[:4]).stdout
    refusal = json.loads(run(*args[:3], "1KiB", "--headroom", "10%", "--json").stdout)
    assert refusal["status"] == "infeasible"
    assert "is neither bytes nor a share" in refused(*args[:4], "--headroom", "all")


def test_problem_files_have_no_allocator(tmp_path):
    graph = {"format": "planner-graph", "version": 1, "resident_bytes": 0, "outputs": ["a"]}
    nodes = [{"name": "a", "seconds": 1.0, "output_bytes": 8, "inputs": []}]
    (tmp_path / "step.json").write_text(json.dumps({**graph, "nodes": nodes}))
    assert "--headroom: a problem file has no device" in refused(
        "solve", tmp_path / "step.json", "--budget", "100%", "--headroom", "1%"
    )


@pytest.mark.parametrize("optimizer", ["adamw", "none"])
def test_a_budget_below_the_model_states_is_refused_with_how_far(optimizer: str) -> None:
    profile = planner.profile(zoo.build("mlp", layers=4, hidden=64, batch=16, optimizer=optimizer), menus=False)
    resident = profile.resident
    states_bytes = resident.total - resident.inputs - resident.loop + resident.parameters
    with pytest.raises(planner.Infeasible, match="or take another optimizer or precision") as caught:
        planner.solve(profile, states_bytes - 1024)
    assert "are 1.00 KiB above" in str(caught.value)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, states_bytes)
    assert "model states" not in str(caught.value)
