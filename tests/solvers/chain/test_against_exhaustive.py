"""Seeded random tiny chains against the oracle: nothing beats it, bounds hold, and claims of optimality are true."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from solvers import Chain, Problem, Solution, replay, solve_chain, solver_names
from solvers.chain.ilp import ChainModel
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.persistent import shortage
from tests.support.chains import random_chain
from tests.support.nightly import by_day

BLOCKS = range(10)  # of ten chains each
SAME = 1e-9


def problems(block: int, shared: bool = False) -> list[Problem]:
    """Chains with budgets around the tight end, below the smallest one too."""
    found = []
    for seed in range(10 * block, 10 * block + 10):
        chain, random = random_chain(seed, odd=seed % 3 == 0, shared=shared), Random(seed)
        low = shortage(chain).minimum_budget_bytes
        found += [Problem(chain=chain, budget_bytes=max(0, low + extra)) for extra in (-1, 0, random.randint(1, 9))]
    return found


def check(problem: Problem, solution: Solution, best: Solution) -> None:
    """The answer replays within the budget, nothing beats the oracle, and what is claimed of bounds is true."""
    if solution.schedule is None:
        assert solution.status == "unknown" or (solution.status == "infeasible" and best.schedule is None)
        assert solution.shortage is not None
        assert solution.shortage.minimum_budget_bytes > problem.budget_bytes
        return
    result = replay(problem.chain, solution.schedule)
    assert (result.peak_bytes, result.seconds) == (solution.peak_bytes, solution.seconds)
    assert result.peak_bytes <= problem.budget_bytes
    assert best.seconds is not None
    assert result.seconds >= best.seconds - SAME
    assert solution.lower_bound_seconds <= best.seconds + SAME
    if solution.status == "optimal":
        assert result.seconds == pytest.approx(best.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("block", by_day(BLOCKS, [0]))
def test_no_method_beats_the_oracle_and_no_claim_is_false(block: int, shared: bool) -> None:
    for problem in problems(block, shared):
        best = solve_chain(problem, "exhaustive")
        for solver in solver_names(linked=False):
            check(problem, solve_chain(problem, solver), best)


@pytest.mark.slow
@pytest.mark.parametrize("block", by_day(BLOCKS, range(4)))
def test_ilp_equals_the_oracle(block: int) -> None:
    for problem in problems(block):
        best, found = solve_chain(problem, "exhaustive"), solve_chain(problem, "ilp")
        assert (found.schedule is None) == (best.schedule is None) == (best.status == "infeasible")
        assert found.status != "infeasible" or best.status == "infeasible"  # its bound is below those of all schedules
        if best.seconds is not None:
            assert found.seconds == pytest.approx(best.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("block", by_day(BLOCKS, range(4)))
def test_the_loose_program_bounds_every_schedule_and_the_exact_one_predicts_its_own(block: int) -> None:
    for problem in problems(block):
        best = solve_chain(problem, "exhaustive")
        if best.seconds is None:
            continue
        assert ChainModel(problem, sweep=False).solve(60).lower_bound_seconds <= best.seconds + 1e-6
        exact = ChainModel(problem, sweep=True).solve(60)
        if exact.schedule is not None and max(problem.chain.optimizer_peak_bytes, 1) <= problem.budget_bytes:
            result = replay(problem.chain, exact.schedule)
            assert result.peak_bytes <= problem.budget_bytes
            assert result.seconds == pytest.approx(exact.lower_bound_seconds)


@pytest.mark.slow
def test_verdicts_agree_but_for_rare_chains_whose_smallest_schedule_is_not_persistent() -> None:
    seen: Counter[str] = Counter()
    for block in BLOCKS:
        for problem in problems(block):
            best = solve_chain(problem, "exhaustive").schedule
            mine = solve_chain(problem, "rotor").schedule
            assert (solve_chain(problem, "auto").schedule is None) == (best is None)
            seen["rotor finds what is not there"] += mine is not None and best is None
            seen["rotor misses"] += mine is None and best is not None
            seen["both refuse"] += mine is None and best is None
    assert seen["rotor finds what is not there"] == 0
    assert seen["rotor misses"] <= 1  # its smallest budget is one of its class and says so
    assert seen["both refuse"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("block", by_day(BLOCKS, range(4)))
def test_the_combinatorial_bound_holds_at_every_budget(block: int) -> None:
    for problem in problems(block):
        for budget in range(problem.budget_bytes, problem.budget_bytes + 6):
            best = solve_chain(Problem(chain=problem.chain, budget_bytes=budget), "exhaustive")
            if best.seconds is not None:
                assert bound_seconds(problem.chain, budget) <= best.seconds


def test_a_folded_chain_overestimates_and_never_underestimates() -> None:
    for seed in range(60):
        chain: Chain = random_chain(seed, shared=True)
        for budget in (12, 16, 20, 60):
            solution = solve_chain(Problem(chain=chain.folded(), budget_bytes=budget), "rotor")
            assert solution.schedule is not None or budget < 60
            if solution.schedule is not None and solution.peak_bytes is not None:
                assert replay(chain, solution.schedule).peak_bytes <= solution.peak_bytes


def test_ctrl_c_leaves_the_best_of_the_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("solvers.chain.registry.rotor_schedules", interrupted)
    solution = solve_chain(Problem(chain=random_chain(1), budget_bytes=10_000))
    assert solution.interrupted and solution.schedule is not None
