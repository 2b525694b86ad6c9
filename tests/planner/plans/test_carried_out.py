"""Solvers asked for schedules that the runtime carries out: none other comes, and the bound holds for all."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from planner.plans.lowering import can_carry_out
from solvers import Chain, Option, Problem, Stage, frontier, replay, solve_chain
from solvers.chain.persistent import shortage
from tests.support.chains import random_chain
from tests.support.nightly import by_day
from tests.support.planned_blocks import planned_block


def problem_of_a_model(chain: Chain, budget_bytes: int) -> Problem:
    links = [((0, 0),) if k and stage.linked else () for k, stage in enumerate(chain.stages)]
    stages = [planned_block(links=each) for each in links]
    return Problem(chain=chain, budget_bytes=budget_bytes, accepts=partial(can_carry_out, stages))


def a_stage(boundary: int, forward: int, kept: int, keeping: int, again: tuple[float, int], gradient: int = 0) -> Stage:
    option = Option(
        forward_seconds=1.0,
        backward_seconds=1.0,
        kept_bytes=kept,
        forward_peak_bytes=keeping,
        backward_peak_bytes=0,
        recompute_seconds=again[0],
        recompute_peak_bytes=again[1],
    )
    return Stage(
        name="block",
        boundary_bytes=boundary,
        forward_seconds=1.0,
        forward_peak_bytes=forward,
        parameter_gradient_bytes=gradient,
        options=(option,),
    )


# The fastest schedule at 100 keeps the last stage and runs the first one again before its backward, for the second to
# run again after it: 3 + 3 s, and 1 + 0.5 + 1 s again. A model would run the first one after it, beside 55 bytes of
# gradients: 10 + 40 + 55 + 1. Within 100, then, the last stage runs again too, and the second keeps what it ran for.
CHAIN = Chain(
    stages=(
        a_stage(10, 50, 40, 50, (1.0, 40)),
        a_stage(1, 1, 10, 11, (0.5, 10)),
        a_stage(0, 95, 40, 95, (1.0, 40), gradient=55),
    )
)


@pytest.mark.parametrize("solver", ["auto", "ilp", "exhaustive"])
def test_a_model_gets_the_fastest_schedule_that_it_can_carry_out(solver: str) -> None:
    any_order = solve_chain(Problem(chain=CHAIN, budget_bytes=100), solver)
    assert (any_order.status, any_order.seconds) == ("optimal", 8.5)
    problem = problem_of_a_model(CHAIN, 100)
    assert problem.accepts is not None and any_order.schedule is not None
    assert not problem.accepts(any_order.schedule)
    solution = solve_chain(problem, solver)
    assert (solution.status, solution.seconds, solution.lower_bound_seconds) == ("feasible", 10.0, 8.5)
    assert solution.schedule is not None and problem.accepts(solution.schedule)


@pytest.mark.parametrize("solver", ["ilp", "exhaustive", "auto", "rotor"])
def test_a_frontier_has_no_others(solver: str) -> None:
    accepts = problem_of_a_model(CHAIN, 0).accepts
    assert accepts is not None
    solutions = frontier(CHAIN, solver, accepts=accepts)
    assert solutions and all(each.schedule is not None and accepts(each.schedule) for each in solutions)
    if solver in ("ilp", "exhaustive"):
        refused = [each.schedule for each in frontier(CHAIN, solver) if each.schedule and not accepts(each.schedule)]
        assert refused


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_day(range(25), range(8)))
@pytest.mark.parametrize("solver", ["ilp", "auto"])
def test_the_program_for_models_knows_all_persistent_schedules_and_no_others_than_accepted(
    seed: int, solver: str
) -> None:
    chain = random_chain(seed, most_stages=6, odd=seed % 3 == 0)
    for extra in (0, 3):
        problem = problem_of_a_model(chain, shortage(chain).minimum_budget_bytes + extra)
        solution, persistent = solve_chain(problem, solver), solve_chain(problem, "rotor")
        best = solve_chain(replace(problem, accepts=None), "ilp")
        assert solution.schedule is not None and problem.accepts is not None and problem.accepts(solution.schedule)
        assert solution.seconds is not None and persistent.seconds is not None and best.seconds is not None
        assert replay(chain, solution.schedule).peak_bytes <= problem.budget_bytes
        assert best.seconds - 1e-9 <= solution.seconds <= persistent.seconds + 1e-9
