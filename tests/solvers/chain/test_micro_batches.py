"""Plans of one micro-batch beside others that keep what the same plan keeps, worked out by hand."""

from __future__ import annotations

import math

from solvers.chain.lower_bound import bound_seconds
from solvers.chain.micro_batches import (
    kept_until_backward,
    most_kept,
    others_bytes,
    solve_beside_others,
    with_others,
    without_others,
)
from solvers.problem.examples import equal_stages
from solvers.problem.simulator import replay
from solvers.problem.solution import Problem

CHAIN = equal_stages(4)
BESIDE = ((3, 0), (1, 5))
BUDGETS = (6, 10, 12, 14, 16, 20, 24, 40, 200)


def test_what_is_beside_is_the_most_of_its_moments() -> None:
    assert [others_bytes(BESIDE, kept) for kept in (0, 1, 2, 3, 4)] == [5, 6, 7, 9, 12]
    assert others_bytes((), 7) == 0


def test_plans_count_what_others_keep_by_them() -> None:
    whole = most_kept(CHAIN)
    unplanned = with_others(CHAIN, BESIDE, whole).resident_bytes
    alone = solve_beside_others(Problem(chain=CHAIN, budget_bytes=10_000), (), "rotor", None)[1]
    seconds: dict[int, float] = {}
    for budget in BUDGETS:
        problem, solution = solve_beside_others(Problem(chain=CHAIN, budget_bytes=budget), BESIDE, "rotor", None)
        if solution.schedule is None:
            bound = bound_seconds(with_others(CHAIN, BESIDE, 0), budget)
            assert solution.status == ("infeasible" if bound == math.inf else "unknown")
            assert (solution.peak_bytes, solution.seconds, solution.gap) == (None, None, None)
            assert solution.shortage is not None
            least = solution.shortage.minimum_budget_bytes
            assert least > budget
            assert solve_beside_others(Problem(chain=CHAIN, budget_bytes=least), BESIDE, "rotor", None)[1].schedule
            continue
        kept = kept_until_backward(CHAIN, solution.schedule)
        assert kept <= whole
        assert problem.chain == with_others(CHAIN, BESIDE, kept)
        assert without_others(problem.chain, BESIDE, solution.schedule) == CHAIN
        peak_bytes = replay(problem.chain, solution.schedule).peak_bytes
        assert peak_bytes == solution.peak_bytes
        assert peak_bytes <= budget
        assert solution.seconds is not None and solution.lower_bound_seconds <= solution.seconds
        seconds[budget] = solution.seconds
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)
    assert seconds[BUDGETS[-1]] == alone.seconds
    assert max(seconds) > unplanned
    # Others that keep everything leave no room at budgets at which those that keep as little as this one do.
    assert min(seconds) < unplanned
