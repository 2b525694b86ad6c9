"""Every method on chains worked out by hand, and the laws that hold for all of them."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import comb

import pytest

from benchmarks.random_chains import large_chain
from solvers import Chain, Problem, Schedule, frontier, replay, solve_chain, solver_names
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.persistent import shortage
from solvers.chain.rotor import Table
from solvers.problem.examples import equal_stages
from tests.support.chains import UNIT, random_chain
from tests.support.nightly import by_day

OPTIMAL = ("rotor", "ilp", "exhaustive", "auto")
QUICK = ("keep_all", "recompute_all", "chen_sqrt", "chen_greedy", "revolve", "rotor")


def solve(chain: Chain, budget_bytes: int, solver: str):
    return solve_chain(Problem(chain=chain, budget_bytes=budget_bytes), solver)


def backward_runs(schedule: Schedule) -> int:
    return sum(action.kind == "backward" for action in schedule.actions)


# Three unit stages: boundary 1, kept 4, forward 1 s, backward 2 s; nothing kept costs 9 s in all.
# Budget 6: forward keeping needs 6 on its own, so at most one stage is kept at a time. First pass drops 0 and 1 (two
#   boundaries would be 2, and keeping stage 2 beside one needs 7): drop all three (3 s), then recompute 2 from
#   boundary 1 (1 + 4 + 1 = 6), then run 0 again for boundary 0 and recompute 1, then recompute 0:
#   3 + 1 + (1 + 1) + 1 + 6 = 13.
# Budget 7: one boundary more: stage 2 is kept at once beside boundary 1 (1 + 6 = 7): 3 + 2 + 1 + 6 = 12.
# Budget 8: boundaries 0 and 1 both stay beside it (2 + 6 = 8): 3 + 1 + 1 + 6 = 11.
# Budget 12: stage 1 is kept too, in the first pass (boundary 0: 1, kept and boundary 1: 5, the last forward: 6): 10.
# Budget 16: all kept: 5 + 5 + 6 = 16, in 9 s.
@pytest.mark.parametrize("solver", OPTIMAL)
@pytest.mark.parametrize(("budget", "seconds"), [(6, 13), (7, 12), (8, 11), (11, 11), (12, 10), (15, 10), (16, 9)])
def test_three_stages_by_hand(solver: str, budget: int, seconds: int) -> None:
    solution = solve(equal_stages(3), budget, solver)
    assert solution.seconds == seconds
    assert solution.peak_bytes is not None and solution.peak_bytes <= budget


@pytest.mark.parametrize("solver", OPTIMAL)
def test_below_the_smallest_budget_the_answer_says_what_forces_it(solver: str) -> None:
    solution = solve(equal_stages(3), 5, solver)
    assert (solution.status, solution.schedule, solution.gap) == ("infeasible", None, None)
    assert solution.shortage is not None
    assert solution.shortage.minimum_budget_bytes == 6  # boundary 1 + kept 4 + backward 1
    assert (solution.shortage.stage, solution.shortage.moment) == ("unit", "backward")
    assert solution.shortage.reason == "the backward of stage 'unit' needs 6 bytes"


def test_the_optimizer_can_force_the_budget() -> None:
    chain = replace(equal_stages(3), optimizer_peak_bytes=50)
    for solver in solver_names(linked=False):
        found = solve(chain, 49, solver).shortage
        assert found is not None and (found.minimum_budget_bytes, found.moment) == (50, "optimizer")
        assert solve(chain, 50, solver).seconds is not None


# Nine unit stages. keep_all: 8 * 5 + 6. recompute_all: 9 boundaries, then kept 4 and backward 1 beside 8 of them;
# the ninth forward stands at 8 + 2. chen_sqrt: 3 segments of 3, the last kept: boundaries 2 and 5, then two stages
# kept (2 * 5) and the third's forward 6 = 18; 6 stages run twice.
@pytest.mark.parametrize(
    ("solver", "peak", "runs"), [("keep_all", 46, 9), ("recompute_all", 13, 18), ("chen_sqrt", 18, 15)]
)
def test_baselines_by_hand(solver: str, peak: int, runs: int) -> None:
    solution = solve(equal_stages(9), 1000, solver)
    assert solution.schedule is not None
    assert (solution.peak_bytes, solution.schedule.forward_runs()) == (peak, runs)


def test_chen_segments_stop_at_unlinked_and_fixed_stages() -> None:
    stages = (UNIT, UNIT, replace(UNIT, linked=False), replace(UNIT, recomputable=False), UNIT, UNIT)
    chain = Chain(stages=stages)
    for solver in ("chen_sqrt", "chen_greedy", "recompute_all"):
        for point in frontier(chain, solver):
            assert point.schedule is not None
            replay(chain, point.schedule)


@pytest.mark.parametrize(("count", "slots", "repeats"), [(10, 2, 3), (10, 3, 2), (50, 5, 3)])
def test_uniform_chains_need_as_many_runs_as_griewank_and_walther_prove(count: int, slots: int, repeats: int) -> None:
    # What a stage keeps is so large that only one is kept at a time, beside `slots` boundaries of one byte:
    # "Algorithm 799: revolve" (2000): n + t n - C(s + t, t - 1) runs with C(s + t - 1, s) < n <= C(s + t, s).
    assert comb(slots + repeats - 1, slots) < count <= comb(slots + repeats, slots)
    way = replace(UNIT.options[0], kept_bytes=100, forward_peak_bytes=101, recompute_peak_bytes=100)
    way = replace(way, backward_peak_bytes=0)
    stage = replace(UNIT, options=(way,), forward_peak_bytes=1)
    last = replace(stage, options=(replace(way, forward_peak_bytes=100),), boundary_bytes=0)
    chain = Chain(stages=(*(stage,) * (count - 1), last))
    solution = solve(chain, 100 + slots, "rotor")
    assert solution.schedule is not None
    assert solution.schedule.forward_runs() == count + repeats * count - comb(slots + repeats, repeats - 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_day(range(4), [0, 1]))
@pytest.mark.parametrize("menu", [1, 3])
def test_a_larger_budget_is_never_slower(seed: int, menu: int) -> None:
    chain = large_chain(seed, 16, menu)
    low, high = shortage(chain).minimum_budget_bytes, frontier(chain, "keep_all")[0].peak_bytes
    assert high is not None
    for solver in QUICK:
        budgets = [low + (high - low) * i // 100 + i % 3 for i in range(102)]
        seconds = [solve(chain, b, solver).seconds or math.inf for b in budgets[:: 1 if solver == "rotor" else 30]]
        assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(seconds))


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_day(range(6), [0, 1]))
def test_baselines_are_no_faster_than_the_optimum_and_that_no_faster_than_the_bound(seed: int) -> None:
    chain = large_chain(seed, 10, 1 + seed % 2)
    points = frontier(chain, "rotor")
    for point in points[:: max(1, len(points) // 4)]:
        budget = point.peak_bytes
        assert budget is not None
        best = solve(chain, budget, "ilp")
        assert best.status == "optimal" and best.seconds is not None
        assert bound_seconds(chain, budget) <= best.seconds
        for solver in QUICK:
            seconds = solve(chain, budget, solver).seconds
            assert seconds is None or seconds >= best.seconds * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_rotor_is_never_slower_than_any_baseline_at_its_own_peak(seed: int) -> None:
    chain = large_chain(seed, 20, 1 + seed % 3)
    for solver in ("recompute_all", "chen_sqrt", "chen_greedy", "revolve"):
        for point in frontier(chain, solver):
            assert point.peak_bytes is not None and point.seconds is not None
            mine = solve(chain, point.peak_bytes, "rotor").seconds
            assert mine is not None and mine <= point.seconds * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_at_the_unplanned_peak_nothing_is_recomputed(seed: int) -> None:
    chain = large_chain(seed, 12)
    peak = frontier(chain, "keep_all")[0].peak_bytes
    assert peak is not None
    for solver in ("keep_all", "rotor", "auto", "ilp"):
        solution = solve(chain, peak, solver)
        assert solution.schedule is not None and solution.status == "optimal"
        assert solution.schedule.forward_runs() == len(chain.stages)
        assert solution.seconds == pytest.approx(chain.unplanned_seconds, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_more_options_are_never_slower(seed: int) -> None:
    menus = large_chain(seed, 12, menu=6)
    whole = menus.without_menus()
    for point in frontier(whole, "rotor"):
        assert point.peak_bytes is not None and point.seconds is not None
        found = solve(menus, point.peak_bytes, "rotor")
        assert found.seconds is not None and found.seconds <= point.seconds * (1 + 1e-12)


def test_what_costs_nothing_is_not_recomputed_for_nothing() -> None:
    way = replace(UNIT.options[0], forward_seconds=0, recompute_seconds=0)
    chain = Chain(stages=(replace(UNIT, options=(way,), forward_seconds=0),) * 3)
    for solver in ("rotor", "ilp", "auto"):
        schedule = solve(chain, 16, solver).schedule
        assert schedule is not None and schedule.forward_runs() == 3


def test_ops_that_cost_nothing_are_not_run_again_for_nothing() -> None:
    keep = UNIT.options[0]
    inside = replace(keep, name="cheap", kept_bytes=keep.kept_bytes - 1)
    chain = Chain(stages=(replace(UNIT, options=(keep, inside)),) * 3)
    for solver in ("rotor", "auto"):
        schedule = solve(chain, 100, solver).schedule
        assert schedule is not None and schedule.choices_inside() == 0


@pytest.mark.parametrize("solver", ["rotor", "auto", "ilp"])
def test_frontiers_with_shared_tensors_replay_in_the_chain_itself(solver: str) -> None:
    for seed in range(8):
        chain = random_chain(seed, shared=True)
        for point in frontier(chain, solver):
            assert point.schedule is not None
            assert replay(chain, point.schedule).peak_bytes == point.peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_scaling_times_scales_the_answer(seed: int) -> None:
    chain = random_chain(seed, most_stages=7)
    slower = Chain.from_dict(_scaled(chain.to_dict(), 8.0))
    for solver in ("rotor", "auto"):
        once, again = frontier(chain, solver), frontier(slower, solver)
        assert [p.peak_bytes for p in once] == [p.peak_bytes for p in again]
        assert [8 * (p.seconds or 0) for p in once] == pytest.approx([p.seconds for p in again])


def _scaled(data, factor: float):
    if isinstance(data, dict):
        return {k: v * factor if k.endswith("_seconds") else _scaled(v, factor) for k, v in data.items()}
    return [_scaled(item, factor) for item in data] if isinstance(data, (list, tuple)) else data


@pytest.mark.parametrize("seed", range(40))
def test_the_table_predicts_exactly_what_the_simulator_finds(seed: int) -> None:
    chain = replace(random_chain(seed, most_stages=8, odd=seed % 2 == 0), optimizer_peak_bytes=0)
    table = Table(chain)
    points = table.points()
    assert points[0].peak_bytes == shortage(chain).minimum_budget_bytes
    for point in points:
        result = replay(chain, table.schedule(point))
        assert result.peak_bytes == point.peak_bytes
        assert result.seconds == pytest.approx(point.seconds, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_the_table_predicts_exactly_where_running_without_keeping_needs_most(seed: int) -> None:
    chain = replace(random_chain(seed, most_stages=9, odd=True), optimizer_peak_bytes=0)
    stages = [replace(stage, forward_peak_bytes=stage.forward_peak_bytes + 4 * (seed % 8)) for stage in chain.stages]
    chain = replace(chain, stages=tuple(replace(s, recomputable=True, linked=True) for s in stages))
    for point in (table := Table(chain)).points():
        assert replay(chain, table.schedule(point)).peak_bytes == point.peak_bytes


def test_a_coarse_grid_still_keeps_exact_peaks_and_falling_seconds() -> None:
    chain = large_chain(3, 24, menu=2)
    table = Table(chain, slots=40)
    points = table.points()
    assert len(points) > 5
    for point in points:
        assert replay(chain, table.schedule(point)).peak_bytes == point.peak_bytes
    assert all(a.peak_bytes < b.peak_bytes and a.seconds > b.seconds for a, b in pairwise(points))


@pytest.mark.parametrize("solver", [name for name in solver_names(linked=False) if name != "exhaustive"])
def test_frontiers_rise_in_peak_and_fall_in_seconds(solver: str) -> None:
    chain = large_chain(1, 8)
    points = frontier(chain, solver, 30)
    assert points
    for point in points:
        assert point.schedule is not None and backward_runs(point.schedule) == 8
        result = replay(chain, point.schedule)
        assert (result.peak_bytes, result.seconds) == (point.peak_bytes, point.seconds)
        assert point.lower_bound_seconds <= result.seconds
    costs = [(point.peak_bytes or 0, point.seconds or 0.0) for point in points]
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(costs))


def test_auto_says_which_method_made_the_answer() -> None:
    assert solve(equal_stages(9), 1000, "auto").solver in solver_names()
    assert solve(equal_stages(9), 1000, "auto").solver != "auto"


def test_ilp_within_no_time_is_still_feasible_with_a_valid_bound() -> None:
    chain = large_chain(0, 30)
    budget = shortage(chain).minimum_budget_bytes
    solution = solve_chain(Problem(chain=chain, budget_bytes=budget), "ilp", 0.01)
    assert solution.status == "feasible" and solution.seconds is not None
    assert 0 < solution.lower_bound_seconds <= solution.seconds


def test_errors_say_what_was_expected() -> None:
    problem = Problem(chain=equal_stages(2), budget_bytes=9)
    with pytest.raises(ValueError, match=r"expected one of keep_all, .*, got 'magic'"):
        solve_chain(problem, "magic")
    with pytest.raises(ValueError, match="expected one of"):
        frontier(equal_stages(2), "magic")
    for limit in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="a time limit: expected seconds above zero"):
            solve_chain(problem, "ilp", limit)
    for budget in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="a budget: expected an integer"):
            Problem(chain=equal_stages(2), budget_bytes=budget)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="exhaustive: expected at most"):
        solve(equal_stages(9), 99, "exhaustive")
    with pytest.raises(ValueError, match="ilp: expected at most"):
        solve(equal_stages(101), 99, "ilp")


def test_chains_and_schedules_survive_a_file_and_refuse_another() -> None:
    chain = random_chain(3, shared=True)
    assert Chain.from_dict(chain.to_dict()) == chain
    with pytest.raises(ValueError, match="version 1"):
        Chain.from_dict({**chain.to_dict(), "version": 2})
    with pytest.raises(ValueError, match="at least one stage"):
        Chain(stages=())
    with pytest.raises(ValueError, match="forward_seconds"):
        Chain(stages=(replace(UNIT, forward_seconds=math.nan),))
    schedule = solve(equal_stages(3), 9, "rotor").schedule
    assert schedule is not None and Schedule.from_list(schedule.to_list()) == schedule
    older = Schedule.from_list([["offload", 0, 0], ["prefetch", 0, 0]])
    assert older.to_list() == [["send", 0, 0], ["fetch", 0, 0]]
    with pytest.raises(ValueError, match="expected one of"):
        Schedule.from_list([["jump", 0, None]])


@pytest.mark.slow
def test_long_chains_do_not_hit_the_recursion_limit() -> None:
    chain = Chain(stages=(replace(UNIT, linked=False),) * 1500)  # nothing may be dropped together: a small table
    assert solve(chain, 10**6, "rotor").seconds == 1500 * 3


def test_importing_solvers_loads_no_torch() -> None:
    code = "import solvers, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
