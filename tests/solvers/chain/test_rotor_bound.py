"""What the table claims of its own error, held against all persistent schedules, exact grids and fine ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from benchmarks.random_chains import large_chain
from solvers import Action, Chain, Schedule, replay
from solvers.chain.rotor import PersistentBound, Table
from solvers.problem.examples import equal_stages
from tests.support.chains import random_chain

Steps = tuple[Action, ...]


def persistent(chain: Chain, start: int, end: int) -> Iterator[Steps]:
    """All persistent schedules of a range, written out from the definition; ``end`` the stage count: the first pass."""
    count, stages = len(chain.stages), chain.stages
    if start > min(end, count - 1):
        yield ()
        return
    for option in range(len(stages[start].options)):
        for rest in persistent(chain, start + 1, end):
            yield (Action("forward", start, option), *rest, Action("free", start), Action("backward", start))
        if start == end:
            yield (Action("recompute", start, option), Action("backward", start))
    for q in range(start + 1, end + 1):
        if all(s.recomputable for s in stages[start:q]) and all(s.linked for s in stages[start + 1 : q]):
            for rest, again in product(persistent(chain, q, end), persistent(chain, start, q - 1)):
                yield (*run(start, q), *rest, Action("free", q - 1), *again)


def run(start: int, q: int) -> Steps:
    steps = [Action("forward", start)]
    for k in range(start + 1, q):
        steps += [Action("forward", k), Action("free", k - 1)]
    return tuple(steps)


def costs(chain: Chain) -> list[tuple[int, float]]:
    """Peak and seconds of every persistent schedule."""
    replays = (replay(chain, Schedule(actions=steps)) for steps in persistent(chain, 0, len(chain.stages)))
    return sorted({(result.peak_bytes, result.seconds) for result in replays})


def optimum(all_costs: list[tuple[int, float]], peak_bytes: int) -> float:
    return min((seconds for peak, seconds in all_costs if peak <= peak_bytes), default=math.inf)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_is_below_every_persistent_schedule_and_meets_the_best_on_an_exact_grid(seed: int) -> None:
    chain = replace(random_chain(seed, most_stages=3, odd=seed % 2 == 0), optimizer_peak_bytes=0)
    all_costs = costs(chain)
    for peak in range(max(0, all_costs[0][0] - 2), min(60, all_costs[-1][0]) + 2):
        level = peak - chain.resident_bytes
        best = optimum(all_costs, peak)
        if level < 0:
            continue
        for steps in (1, 3, 8, 21):
            assert PersistentBound(chain, level, steps).seconds(level) <= best
        assert PersistentBound(chain, level, level + 100).seconds(level) == pytest.approx(best, rel=1e-8)


@pytest.mark.parametrize("seed", range(40))
def test_tables_find_the_persistent_optimum_and_coarse_ones_err_by_no_more_than_they_say(seed: int) -> None:
    chain = replace(random_chain(seed, most_stages=3, odd=seed % 2 == 0), optimizer_peak_bytes=0)
    all_costs = costs(chain)
    exact = Table(chain)
    for point in exact.points():
        assert point.seconds == pytest.approx(optimum(all_costs, point.peak_bytes), rel=1e-9)
        assert exact.error_seconds(point) == 0
    coarse = Table(chain, slots=6)
    for point in coarse.points():
        best = optimum(all_costs, point.peak_bytes)
        assert best <= point.seconds * (1 + 1e-9)
        assert point.seconds - coarse.error_seconds(point) <= best * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("menu", [1, 3])
def test_what_a_coarse_grid_says_of_its_error_holds_against_a_fine_one(menu: int) -> None:
    chain = large_chain(menu, 12, menu)
    coarse, fine = Table(chain, slots=60), Table(chain, slots=20_000).points()
    for point in coarse.points()[::3]:
        best = min(p.seconds for p in fine if p.peak_bytes <= point.peak_bytes)  # no better than the optimum
        error = coarse.error_seconds(point)
        assert point.seconds - error <= best * (1 + 1e-9)
        assert error < 0.1 * point.seconds  # a proof that says something


def test_a_grid_with_a_slot_for_every_need_proves_its_answers() -> None:
    table = Table(equal_stages(40))
    assert all(table.error_seconds(point) == 0 for point in table.points())
