"""Profiles at every size: how many there are, and what is known of sizes that have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import planner
from planner.capacity import scaling
from planner.capacity.limit_search import LimitSearch, PredictedLimits, SearchStart
from planner.capacity.scaling import NoProfile, PerSizeProfiles, ProfileScaling
from planner.capacity.step_trial import Trial
from profiler.step_graph import runs_once

BUDGET = 10**7
UNFIT = 6  # layers that the model is not built with


def build(layers):
    if layers == UNFIT:
        raise ValueError("that many do not fit together")
    model = torch.nn.Sequential(*[torch.nn.Linear(10, 10) for _ in range(layers)])
    return planner.Workload(model=model, inputs=torch.randn(8, 10), loss=lambda y: y.square().mean())


@pytest.fixture(scope="module")
def known():
    return ProfileScaling(sizes=(1, 2), profiles=tuple(planner.profile(build(size), menus=False) for size in (1, 2)))


@pytest.fixture
def profiles(known):
    return PerSizeProfiles(build, known, menus=False, progress=lambda size: lambda what, done, total: None, why="")


def search(profiles, monkeypatch) -> Any:
    predicted = PredictedLimits(profiles, BUDGET, planner.Offload(mode="never"))

    def train(build, size, plan, *, repeats):
        return Trial(size=size, peak_bytes=predicted.plan_at("none", size)[1], seconds=float(size), plan=plan)

    monkeypatch.setattr("planner.capacity.limit_search.run_trial", train)
    start = SearchStart(smallest=1, step=1, states_bytes=1, device=torch.device("cpu"))
    return LimitSearch(build, "layers", start, predicted, lambda what: None).run(())


def test_a_size_is_profiled_once(profiles):
    assert profiles.at(3) is profiles.at(3)
    assert profiles.sizes == (1, 2, 3) and len(profiles.profiles) == 3


@pytest.mark.slow
def test_the_largest_size_within_the_most_profiles_is_the_limit(profiles, monkeypatch):
    monkeypatch.setattr(scaling, "MOST_PROFILES", 4)
    found = search(profiles, monkeypatch)  # 1 and 2 are known; doubling asks for 1, 3, 7 and 15
    assert found.profiled == (1, 2, 3, 7)
    for limit in (found.none, found.recompute):
        assert limit.size == 7 and limit.confirmed and not limit.next_fails
        assert "layers=8 was not tried: not profiled, as 4 sizes were" in limit.reason


def test_a_size_that_is_refused_or_has_no_room_has_no_profile(profiles, monkeypatch):
    for _ in range(2):
        with pytest.raises(NoProfile, match="refused: that many do not fit together"):
            profiles.at(UNFIT)
    monkeypatch.setattr("planner.capacity.step_trial.room_bytes", lambda device: 0)
    with pytest.raises(NoProfile, match="no room"):
        profiles.at(4)


def test_running_out_of_memory_is_told_from_a_refusal(profiles, monkeypatch):
    def full(*args, **options):
        raise planner.errors.ProfileError("the step fails") from torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(scaling, "profile", full)
    with pytest.raises(NoProfile, match="no room"):
        profiles.at(5)


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_a_size_is_profiled_where_there_is_room_for_its_peak_and_a_copy_of_what_is_resident(
    known, monkeypatch, missing_bytes
):
    """Peaks of 1000, 2000 and 4000 bytes: the line through the last two is at 8000 with two layers more."""
    first, last = known.profiles
    peaks = zip((first, last, last), (1000, 2000, 4000), strict=True)
    three = ProfileScaling(sizes=(1, 2, 3), profiles=tuple(replace(p, unplanned_peak_bytes=peak) for p, peak in peaks))
    room = 8000 + last.resident.total - missing_bytes
    monkeypatch.setattr("planner.capacity.step_trial.room_bytes", lambda device: room)
    monkeypatch.setattr(scaling, "profile", lambda workload, **options: last)
    profiles = PerSizeProfiles(build, three, menus=False, progress=lambda size: lambda what, done, total: None, why="")
    if missing_bytes:
        with pytest.raises(NoProfile, match="no room"):
            profiles.at(5)
    else:
        assert profiles.at(5) is last


def test_a_size_that_was_refused_is_not_tried_again(known):
    built = []

    def refusing(size):
        built.append(size)
        return build(size)

    profiles = PerSizeProfiles(
        refusing, known, menus=False, progress=lambda size: lambda what, done, total: None, why=""
    )
    for _ in range(2):
        with pytest.raises(NoProfile, match="refused"):
            profiles.at(UNFIT)
    assert built == [UNFIT]


@pytest.mark.slow
def test_a_size_has_the_programs_of_another_one_for_stages_of_the_same_ops(blocks):
    same = scaling.same_programs(blocks)
    assert same is not None and scaling.same_programs(blocks.stage_level()) is None
    captured = [menu for menu in blocks.menus if menu.graph is not None]
    wanted = {option.runs for menu in captured for option in menu.options}
    assert captured and {runs for menu in captured for runs in same(menu.graph)} == wanted
    graph = captured[0].graph
    others = replace(graph, ops=tuple(replace(op, op=f"other {op.op}") for op in graph.ops))
    assert same(others) == [runs_once(others)]
    larger = replace(graph, storages=tuple(replace(s, size_bytes=2 * s.size_bytes) for s in graph.storages))
    assert list(same(larger)) == list(same(graph))
