"""Answers with a link: the laws that tie them to recomputation alone, to copies alone, and to the link."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from benchmarks.random_chains import large_chain
from solvers import Chain, Link, Problem, Solution, frontier, replay, solve_chain
from solvers.chain import offloading
from solvers.chain.candidates import without_offload_units
from solvers.problem.schedule import TRANSFERS
from tests.support.chains import UNIT, with_offload_units
from tests.support.nightly import by_day

LIMIT = 1e-12  # relative: two sums of the same seconds
ENDLESS = Link(to_host_bytes_per_second=math.inf, to_device_bytes_per_second=math.inf)


def link(rate: float, host_bytes: int | None = None) -> Link:
    return Link(
        to_host_bytes_per_second=rate, to_device_bytes_per_second=rate, latency_seconds=1e-3, host_bytes=host_bytes
    )


def chain_of(seed: int, count: int = 12) -> Chain:
    return with_offload_units(large_chain(seed, count, 1 + seed % 3), Random(seed))


def rate_of(chain: Chain) -> float:
    """At which all offload units of a step that keeps everything leave in one step's time."""
    return sum(sum(stage.options[0].offload_units) for stage in chain.stages) / chain.unplanned_seconds


def budgets_of(chain: Chain) -> list[int]:
    high = frontier(chain, "keep_all")[0].peak_bytes or 0
    low = frontier(chain, "rotor")[0].peak_bytes or 0
    return [low + (high - low) * i // 5 for i in range(6)]


def solve(chain: Chain, budget: int, link: Link | None, solver: str = "rotor") -> Solution:
    """A solution that says of itself what its replay says."""
    problem = Problem(chain=chain, budget_bytes=budget, link=link)
    solution = solve_chain(problem, solver)
    if solution.schedule is not None:
        result = replay(chain, solution.schedule, link)
        assert (result.peak_bytes, result.seconds) == (solution.peak_bytes, solution.seconds)
        assert result.peak_bytes <= budget
        assert link is None or link.host_bytes is None or result.host_peak_bytes <= link.host_bytes
        assert solution.lower_bound_seconds <= result.seconds
    return solution


def copies(solution: Solution) -> int:
    assert solution.schedule is not None
    return sum(action.kind in TRANSFERS for action in solution.schedule.actions)


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_day(range(3), [1]))
def test_both_together_are_never_slower_than_either_alone(seed: int) -> None:
    chain = chain_of(seed)
    gained = 0
    for budget in budgets_of(chain):
        for part in (0.1, 0.5, 2):
            over = link(part * rate_of(chain))
            both, alone = solve(chain, budget, over), solve(chain, budget, None)
            assert both.seconds is not None and alone.seconds is not None
            assert both.seconds <= alone.seconds * (1 + LIMIT)
            only = solve(chain, budget, over, "offload_only")
            assert both.seconds <= (only.seconds or math.inf) * (1 + LIMIT)
            assert copies(both) % 3 == 0
            gained += both.seconds < alone.seconds * (1 - 1e-3)
    assert gained >= 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_day(range(3), [1]))
def test_more_bandwidth_is_never_slower(seed: int) -> None:
    chain = chain_of(seed)
    rates = [rate_of(chain) * 0.03 * 3**i for i in range(6)]
    for budget in budgets_of(chain)[1:5:2]:
        for solver in ("rotor", "offload_only"):
            seconds = [solve(chain, budget, over, solver).seconds for over in (*map(link, rates), ENDLESS)]
            found = [math.inf if s is None else s for s in seconds]
            assert all(later <= earlier * (1 + LIMIT) for earlier, later in pairwise(found))


@pytest.mark.slow
def test_auto_counts_drafts_for_slower_links_and_never_gets_slower_with_a_faster_one() -> None:
    chain = chain_of(1, count=14)
    budget = budgets_of(chain)[2]
    found = [solve(chain, budget, link(rate_of(chain) * 0.15 * 1.5**i), "auto") for i in range(5)]
    seconds = [solution.seconds or math.inf for solution in found]
    assert all(later <= earlier * (1 + LIMIT) for earlier, later in pairwise(seconds))
    assert "pofo" in {solution.solver for solution in found}


def alike(count: int) -> Chain:
    """Stages as alike as a transformer's, with much more kept than handed on."""
    way = replace(
        UNIT.options[0], kept_bytes=300, forward_peak_bytes=360, backward_peak_bytes=60, offload_units=(29,) * 10
    )
    way = replace(way, recompute_peak_bytes=330)
    stage = replace(
        UNIT, options=(way,), boundary_bytes=10, forward_peak_bytes=60, gradient_bytes=10, offload_units=(10,)
    )
    return Chain(stages=(replace(stage, offload_units=()), *(stage,) * (count - 1)), resident_bytes=100)


@pytest.mark.slow
def test_pofo_is_never_slower_than_recomputing_alone_and_drafts_what_placing_does_not_find() -> None:
    chain = alike(24)
    faster = 0
    for budget in (2000, 2400):
        for part in (0.1, 0.3, 1):
            over = link(rate_of(chain) * part)
            drafted, placed = solve(chain, budget, over, "pofo"), solve(chain, budget, over)
            alone = solve(chain, budget, None)
            assert drafted.seconds is not None and alone.seconds is not None and placed.seconds is not None
            assert drafted.seconds <= alone.seconds * (1 + LIMIT)
            faster += drafted.seconds < placed.seconds * (1 - LIMIT)
    assert faster > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_day(range(3), [1]))
@pytest.mark.parametrize("solver", ["rotor", "offload_only"])
def test_a_larger_budget_is_never_slower(seed: int, solver: str) -> None:
    chain = chain_of(seed)
    low, *_, high = budgets_of(chain)
    over = link(rate_of(chain) * 0.7)
    found = [solve(chain, low + (high - low) * i // 12, over, solver).seconds or math.inf for i in range(13)]
    assert all(later <= earlier * (1 + LIMIT) for earlier, later in pairwise(found))


@pytest.mark.parametrize("nothing", [None, link(0.0), link(1e9, host_bytes=0), link(1e9, host_bytes=1)])
def test_a_link_that_carries_nothing_changes_nothing(nothing: Link | None) -> None:
    chain = chain_of(1)
    for budget in budgets_of(chain)[::2]:
        assert solve(chain, budget, nothing).schedule == solve(chain, budget, None).schedule


def test_units_that_are_none_change_nothing() -> None:
    bare = large_chain(1, 12, 2)
    budget = budgets_of(bare)[1]
    assert solve(bare, budget, ENDLESS).schedule == solve(bare, budget, None).schedule


@pytest.mark.parametrize("seed", by_day(range(3), [1]))
def test_over_an_endless_link_nothing_runs_twice_where_keeping_fits_with_units_away(seed: int) -> None:
    chain = chain_of(seed)
    least = solve(chain, 0, ENDLESS, "offload_only").shortage
    assert least is not None
    for budget in (least.minimum_budget_bytes, least.minimum_budget_bytes + 10**6):
        solution = solve(chain, budget, ENDLESS)
        assert solution.schedule is not None and copies(solution) > 0
        assert solution.schedule.forward_runs() == len(chain.stages)
        assert solution.seconds == pytest.approx(replay(chain, solution.schedule, ENDLESS).seconds)


@pytest.mark.parametrize("seed", by_day(range(4), [0, 1]))
def test_the_program_is_never_slower_than_what_it_starts_from_and_keeps_its_word(seed: int) -> None:
    chain = with_offload_units(large_chain(seed, 4, 1 + seed % 2), Random(seed), most=2)
    low, *_, high = budgets_of(chain)
    over = link(rate_of(chain))
    for budget in (low, low + (high - low) // 3):
        found = solve(chain, budget, over, "offload_ilp")
        assert found.seconds is not None
        for solver in ("rotor", "pofo"):
            assert found.seconds <= (solve(chain, budget, over, solver).seconds or math.inf) * (1 + LIMIT)
        best = solve_chain(Problem(chain=chain, budget_bytes=budget), "exhaustive").seconds
        assert best is not None and found.seconds <= best * (1 + LIMIT)


@pytest.mark.parametrize("seed", by_day(range(4), [0, 1]))
def test_the_program_counts_all_bytes_of_its_own_schedule(seed: int) -> None:
    chain = with_offload_units(large_chain(seed, 4, 1 + seed % 2), Random(seed), most=2)
    low, *_, high = budgets_of(chain)
    over = link(rate_of(chain))
    for part in range(1, 4):
        problem = Problem(chain=chain, budget_bytes=low + (high - low) * part // 4, link=over)
        schedule = offloading.solve_program(problem, over)
        assert schedule is not None
        assert replay(chain, schedule, over).peak_bytes <= problem.budget_bytes


def test_the_program_places_a_copy_where_list_scheduling_does_not() -> None:
    chain = with_offload_units(large_chain(1, 5, 2), Random(1), most=2)
    low, *_, high = budgets_of(chain)
    over = replace(link(rate_of(chain)), latency_seconds=0.0)
    budget = low + (high - low) // 3
    found = [solve(chain, budget, over, solver).seconds or math.inf for solver in ("offload_ilp", "rotor", "pofo")]
    assert found[0] < min(found[1:])


def test_a_program_for_a_long_chain_is_refused() -> None:
    chain = chain_of(0, count=17)
    with pytest.raises(ValueError, match="offload_ilp: expected at most 16 stages, got 17; use pofo"):
        solve(chain, 10**9, link(1e6), "offload_ilp")


def test_host_memory_limits_what_leaves() -> None:
    chain = chain_of(0)
    budget = budgets_of(chain)[2]
    found = []
    for part in (0.05, 0.2, 1.0):
        limit = round(part * sum(sum(stage.options[0].offload_units) for stage in chain.stages))
        solution = solve(chain, budget, link(rate_of(chain) * 3, host_bytes=limit))
        assert solution.schedule is not None and copies(solution) > 0
        found.append(solution.seconds)
    assert found == sorted(found, reverse=True) and found[-1] < found[0]


def least_without(chain: Chain, solver: str) -> int:
    peak_bytes = frontier(chain, "keep_all" if solver == "offload_only" else "rotor")[0].peak_bytes
    assert peak_bytes is not None
    return peak_bytes - (solver == "offload_only")  # a single stage may force the peak where stages run again


@pytest.mark.parametrize("solver", ["rotor", "auto", "offload_only", "pofo"])
def test_below_the_smallest_budget_the_answer_names_one_that_is_met(solver: str) -> None:
    chain = chain_of(2, count=8)
    over = link(rate_of(chain))
    low = solve(chain, 0, over, solver)
    assert low.status == "infeasible" and low.shortage is not None
    assert low.shortage.minimum_budget_bytes <= least_without(chain, solver)
    assert solve(chain, low.shortage.minimum_budget_bytes, over, solver).schedule is not None
    assert solve(chain, low.shortage.minimum_budget_bytes - 1, over, solver).schedule is None


@pytest.mark.parametrize("solver", ["rotor", "auto", "offload_only"])
def test_every_point_of_a_frontier_replays_and_none_beats_another(solver: str) -> None:
    chain = chain_of(1, count=8)
    over = link(rate_of(chain))
    points = frontier(chain, solver, link=over)
    assert any(copies(point) for point in points) and len(points) > 5
    for point in points:
        assert point.schedule is not None
        result = replay(chain, point.schedule, over)
        assert (result.peak_bytes, result.seconds) == (point.peak_bytes, point.seconds)
        assert point.lower_bound_seconds <= result.seconds
    assert [p.peak_bytes for p in points] == sorted(p.peak_bytes or 0 for p in points)
    assert [p.seconds for p in points] == sorted((p.seconds or 0.0 for p in points), reverse=True)
    assert (points[0].peak_bytes or 0) <= least_without(chain, solver)


@pytest.mark.parametrize("solver", ["offload_only", "pofo", "offload_ilp"])
@pytest.mark.parametrize("nothing", [None, link(0.0), link(1e9, host_bytes=0)])
def test_methods_that_send_need_a_link(solver: str, nothing: Link | None) -> None:
    with pytest.raises(ValueError, match=f"{solver}: expected a link with rates above zero and host memory, got"):
        solve_chain(Problem(chain=chain_of(0), budget_bytes=10**9, link=nothing), solver)


def test_a_chain_without_its_units_holds_less_everywhere_and_costs_the_same() -> None:
    chain = chain_of(0)
    away = without_offload_units(chain, len(chain.stages))
    for point in frontier(chain, "rotor")[::10]:
        assert point.schedule is not None
        there = replay(away, point.schedule)
        assert there.seconds == point.seconds
        pairs = zip(there.timeline, replay(chain, point.schedule).timeline, strict=True)
        assert all(less.before_bytes <= more.before_bytes for less, more in pairs)
    assert replace(without_offload_units(chain, 0)) == chain
