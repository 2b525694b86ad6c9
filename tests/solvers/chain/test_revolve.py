"""Binomial checkpointing against its own recursion, its closed form, the simulator and the table's optimum."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.random_chains import large_chain
from solvers import Chain, Option, Problem, Stage, frontier, replay, solve_chain
from solvers.chain import revolve
from solvers.chain.revolve import forward_runs
from solvers.problem.examples import equal_stages
from solvers.problem.schedule import RUNS
from tests.support.chains import random_chain


@cache
def fewest(n: int, s: int) -> int:
    """The recursion itself: q stages to the next boundary, what is behind it, then these q again."""
    if n == 1:
        return 1
    if s == 0:
        return 10**9
    return min(q + fewest(n - q, s - 1) + fewest(q, s) for q in range(1, n))


def one_at_a_time(count: int) -> Chain:
    """A stage keeps 100 bytes; a boundary is 1, so that memory 100 + s holds one stage and s boundaries."""
    way = Option(
        forward_seconds=1,
        backward_seconds=2,
        kept_bytes=100,
        forward_peak_bytes=101,
        backward_peak_bytes=0,
        recompute_seconds=1,
        recompute_peak_bytes=100,
    )
    stage = Stage(name="u", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=1)
    last = replace(stage, options=(replace(way, forward_peak_bytes=100),), boundary_bytes=0)
    return Chain(stages=(*(stage,) * (count - 1), last))


def test_known_values() -> None:
    assert [forward_runs(10, 3), forward_runs(50, 5), forward_runs(100, 10)] == [25, 172, 322]
    assert [forward_runs(n, 1) for n in (1, 2, 7)] == [1, 3, 28]  # one slot: n + (n - 1) + .. + 1
    assert [forward_runs(n, n - 1) for n in (2, 7, 50)] == [3, 13, 99]  # every boundary held: all but the last twice


def test_the_closed_form_is_the_recursions_minimum() -> None:
    for n in range(1, 41):
        for s in range(1, 12):
            assert forward_runs(n, s) == fewest(n, s)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 33])
def test_schedules_replay_with_as_many_runs_as_the_closed_form(count: int) -> None:
    chain = one_at_a_time(count)
    made = revolve.schedules(chain)
    assert len(made) == max(1, count - 1)
    for slots, schedule in enumerate(made, start=1):
        result = replay(chain, schedule)
        runs = sum(moment.action.kind in RUNS for moment in result.timeline)
        assert runs == forward_runs(count, slots)
        assert result.peak_bytes <= 100 + slots


@pytest.mark.parametrize("count", [2, 9, 30])
def test_rotor_needs_no_more_runs_and_as_many_where_one_stage_is_kept_at_a_time(count: int) -> None:
    chain = one_at_a_time(count)
    for slots in range(1, count):
        schedule = solve_chain(Problem(chain=chain, budget_bytes=100 + slots), "rotor").schedule
        assert schedule is not None
        assert schedule.forward_runs() == forward_runs(count, slots)


@pytest.mark.parametrize("count", [5, 20])
def test_rotor_is_never_slower_in_the_memory_of_a_revolve_schedule(count: int) -> None:
    for chain in (equal_stages(count), large_chain(1, count)):
        for schedule in revolve.schedules(chain):
            result = replay(chain, schedule)
            best = solve_chain(Problem(chain=chain, budget_bytes=result.peak_bytes), "rotor")
            assert best.seconds is not None and best.seconds <= result.seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_fixed_unlinked_and_sharing_stages_still_replay(seed: int) -> None:
    chain = random_chain(seed, most_stages=9, odd=seed % 2 == 0, shared=seed % 3 == 0)
    for schedule in revolve.schedules(chain):
        result = replay(chain, schedule)
        done = Counter(m.action.stage for m in result.timeline if m.action.kind == "backward")
        assert done == Counter(range(len(chain.stages)))


def test_the_frontier_is_a_curve_and_long_chains_get_a_bounded_number_of_candidates() -> None:
    points = frontier(equal_stages(30), "revolve")
    assert len(points) > 5
    assert len(revolve.schedules(equal_stages(500))) <= 48


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "3", None])
def test_numbers_that_mean_nothing_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="stages: expected a whole number above zero"):
        forward_runs(bad, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="slots: expected a whole number above zero"):
        forward_runs(3, bad)  # pyright: ignore[reportArgumentType]


def test_its_public_name_is_a_module_of_the_package() -> None:
    """As others import it: ``from solvers.revolve import forward_runs``."""
    assert importlib.import_module("solvers.revolve").forward_runs is forward_runs
