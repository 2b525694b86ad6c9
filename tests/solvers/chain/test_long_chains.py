"""Long chains: close to the bound, never slower with more memory, feasible wherever the smallest schedule is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.random_chains import large_chain
from solvers import Chain, Problem, frontier, replay, solve_chain
from solvers.chain import baselines
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.persistent import shortage, smallest_schedule
from solvers.chain.rotor import Effort, Table
from tests.support.chains import UNIT, random_chain

CLOSE = 0.01  # what is asked of budgets between a tenth and nine tenths of the way to the unplanned peak


def repeating(count: int) -> Chain:
    """Two kinds of stages in turn, between a first stage that keeps nothing and a last one that keeps much."""
    small, large = large_chain(1, 2).stages
    first = replace(small, options=(replace(small.options[0], kept_bytes=0),))
    last = replace(large, options=(replace(large.options[0], kept_bytes=50_000_000, forward_peak_bytes=60_000_000),))
    return Chain(stages=(first, *((small, large) * ((count - 2) // 2)), last))


CHAINS = {
    "random": lambda count: large_chain(0, count),
    "menus": lambda count: large_chain(1, count, 4),
    "homogeneous": lambda count: Chain(stages=large_chain(3, 1).stages * count),
    "repeating": repeating,
}


def unplanned_peak(chain: Chain) -> int:
    return replay(chain, baselines.keep_all(chain)[0]).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHAINS)
def test_long_chains_come_within_one_percent_of_the_bound_on_all_schedules(kind: str) -> None:
    chain = CHAINS[kind](400)
    table = Table(chain)
    low, top = shortage(chain).minimum_budget_bytes, unplanned_peak(chain)
    for depth in (0.1, 0.5, 0.9):
        budget = int(low + depth * (top - low))
        point = [point for point in table.points() if point.peak_bytes <= budget][-1]
        result = replay(chain, table.schedule(point))
        assert result.peak_bytes == point.peak_bytes
        assert result.seconds == pytest.approx(point.seconds, rel=1e-9)
        assert result.seconds <= bound_seconds(chain, budget) / (1 - CLOSE)


@pytest.mark.slow
def test_a_thousand_stages_within_a_whole_call() -> None:
    chain = large_chain(7, 1000)
    low, top = shortage(chain).minimum_budget_bytes, unplanned_peak(chain)
    solution = solve_chain(Problem(chain=chain, budget_bytes=low + (top - low) // 5), "rotor")
    assert solution.schedule is not None and solution.gap is not None and solution.gap <= CLOSE
    result = replay(chain, solution.schedule)
    assert (result.peak_bytes, result.seconds) == (solution.peak_bytes, solution.seconds)
    smallest = solve_chain(Problem(chain=chain, budget_bytes=low), "rotor")
    assert smallest.status == "feasible" and smallest.peak_bytes is not None and smallest.peak_bytes <= low
    assert solve_chain(Problem(chain=chain, budget_bytes=low - 1), "rotor").status == "infeasible"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_larger_budget_is_never_slower_on_a_long_chain() -> None:
    chain = large_chain(2, 300, 2)
    low, top = shortage(chain).minimum_budget_bytes, unplanned_peak(chain)
    budgets = [low + (top - low) * i // 20 + i % 3 for i in range(23)]
    seconds = [solve_chain(Problem(chain=chain, budget_bytes=b), "rotor").seconds or 0.0 for b in budgets]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(seconds))


@pytest.mark.slow
def test_the_frontier_of_a_long_chain_is_replayed_and_not_endless() -> None:
    chain = large_chain(4, 300)
    points = frontier(chain, "rotor")
    assert 10 < len(points) <= 40
    for point in points[::6]:
        assert point.schedule is not None
        assert replay(chain, point.schedule).peak_bytes == point.peak_bytes


@pytest.mark.parametrize("seed", range(30))
def test_restricted_tables_of_any_chain_replay_and_are_no_faster_than_whole_ones(seed: int) -> None:
    odd, shared = seed % 2 == 0, seed % 5 == 0
    chain = replace(random_chain(seed, most_stages=14, odd=odd, shared=shared).folded(), optimizer_peak_bytes=0)
    whole = Table(chain).points()
    for effort in (Effort(500, 500, 2, 2), Effort(700, 20, 3, 2), Effort(60, 60, 1, 4)):
        table = Table(chain, effort=effort)
        for point in table.points():
            result = replay(chain, table.schedule(point))
            assert result.peak_bytes == point.peak_bytes
            assert result.seconds == pytest.approx(point.seconds, rel=1e-9)
            assert result.seconds >= min(p.seconds for p in whole if p.peak_bytes <= point.peak_bytes) * (1 - 1e-9)


def test_long_ranges_between_posts_reach_budgets_that_short_ones_do_not() -> None:
    chain = Chain(stages=(UNIT,) * 120)
    least = [Table(chain, effort=Effort(600, 600, 8, s)).points()[0].peak_bytes for s in (120, 4)]
    assert least[1] < least[0]
    assert least[1] >= replay(chain, smallest_schedule(chain)).peak_bytes
