"""Planned steps that send tensors to host memory: the same numbers, the predicted bytes, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import planner
from planner import applier, parcels
from planner.artificial_link import ArtificialEngine
from planner.cost_model import chain_of
from planner.planning import plan_of
from solvers import Chain, Problem, Schedule, Solution, replay
from solvers.link import Link
from solvers.segments import Segment, droppable_runs, segmented_schedule
from tests.odd_models import workload
from tests.planner.test_exact import assert_same, choosing_inside, state_after
from tests.planner.transfers import AMPLE, with_transfers

CASES = [("dropout", "kept"), ("dropout", "recomputed"), ("dropout", "halves"), ("dropout", "inside")]
CASES += [
    ("batchnorm", "kept"),
    ("batchnorm", "inside"),
    ("skip", "halves"),
    ("in_place", "kept"),
    ("in_place", "inside"),
]
MODELS = list(dict.fromkeys(name for name, _ in CASES))


@pytest.fixture(autouse=True)
def small_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are tiny."""
    monkeypatch.setattr(parcels, "SMALLEST_PARCEL_BYTES", 64)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[ArtificialEngine]:
    """The engines of all plans that the test applies."""
    found: list[ArtificialEngine] = []
    make = applier.engine_for

    def noted(*args: Any) -> Any:
        engine = make(*args)
        if isinstance(engine, ArtificialEngine):
            found.append(engine)
        return engine

    monkeypatch.setattr(applier, "engine_for", noted)
    return found


def kept(chain: Chain) -> Schedule:
    return segmented_schedule([Segment(k, k + 1, kept=True) for k in range(len(chain.stages))])


def recomputed(chain: Chain) -> Schedule:
    """Each stage that can be runs again alone, from its input."""
    found: list[Segment] = []
    for run in droppable_runs(chain):
        found += [run] if run.kept else [Segment(k, k + 1) for k in range(run.start, run.end)]
    return segmented_schedule(found)


def halves(chain: Chain) -> Schedule:
    """In every run of stages the first half runs again together, from one input; the others are kept."""
    found: list[Segment] = []
    for run in droppable_runs(chain):
        half = (run.start + run.end + 1) // 2
        found += [run] if run.kept else [Segment(run.start, half)]
        found += [] if run.kept else [Segment(k, k + 1, kept=True) for k in range(half, run.end)]
    return segmented_schedule(found)


SCHEDULES = {"kept": kept, "recomputed": recomputed, "halves": halves, "inside": choosing_inside}


def planned(
    profile: planner.Profile, make: Any, *, seed: int = 0, share: float = 1.0, link: Link = AMPLE
) -> planner.Plan:
    """A plan with transfers drawn into the schedule that ``make`` gives."""
    chain = chain_of(profile)
    schedule = with_transfers(chain, make(chain), random.Random(seed), share)
    replayed = replay(chain, schedule, link)
    solution = Solution(
        solver="by hand",
        status="feasible",
        schedule=schedule,
        peak_bytes=replayed.peak_bytes,
        seconds=replayed.seconds,
        lower_bound_seconds=0.0,
        solve_seconds=0.0,
    )
    return plan_of(profile, Problem(chain=chain, budget_bytes=replayed.peak_bytes, link=link), solution)


@pytest.fixture(scope="module")
def profiles() -> Iterator[dict[str, planner.Profile]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(parcels, "SMALLEST_PARCEL_BYTES", 64)
    yield {name: planner.profile(workload(name)) for name in MODELS}
    patch.undo()


@pytest.mark.parametrize(("name", "make"), CASES)
def test_what_travels_changes_no_number_and_takes_the_predicted_bytes(
    name: str, make: str, profiles: dict[str, planner.Profile], engines: list[ArtificialEngine]
) -> None:
    expected = state_after(workload(name))
    plan = planned(profiles[name], SCHEDULES[make])
    work = workload(name)
    with planner.apply(work.model, plan):
        assert_same(state_after(work), expected)
        measured = planner.measure(work, repeats=1)
    assert measured.peak_bytes <= plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes - measured.peak_bytes <= 0.02 * measured.peak_bytes
    assert engines[-1].memory.peak_bytes == plan.host_bytes > 0
    assert engines[-1].memory.held_bytes == 0
