"""Chains are called infeasible where that is proven, and unknown where a method found nothing and ruled nothing out."""

from __future__ import annotations

import math

import pytest

from solvers import Chain, Link, Option, Problem, Stage, frontier, replay, solve_chain
from solvers.chain.lower_bound import bound_seconds
from solvers.problem.chain import Shared
from solvers.problem.examples import equal_stages
from tests.support.chains import actions


def a_stage(seconds: float, kept: int, backward: int) -> Stage:
    option = Option(
        forward_seconds=seconds,
        backward_seconds=1.0,
        kept_bytes=kept,
        forward_peak_bytes=kept + 1,
        backward_peak_bytes=backward,
        recompute_seconds=seconds,
        recompute_peak_bytes=kept,
    )
    return Stage(name="", boundary_bytes=1, forward_seconds=seconds, forward_peak_bytes=1, options=(option,))


# What the first stage makes is read again by the second one, which holds it where it waits to run again; where it is
# kept, 60 bytes are, and 100 are not. No method for shared tensors weighs that.
SKIP = Chain(
    stages=(a_stage(1.0, 60, 0), a_stage(0.001, 60, 0), *[a_stage(1.0, 60, 0)] * 11, a_stage(1.0, 0, 300)),
    shared=(Shared(size_bytes=100, born=0, forward_death=1, readers=(1,)),),
)


def test_a_budget_that_a_schedule_meets_is_not_called_infeasible() -> None:
    last = len(SKIP.stages) - 1
    kept = (1, last)
    rows: list[tuple] = [("forward", k, 0 if k in kept else None) for k in range(last + 1)]
    for k in range(last, -1, -1):
        rows += [("free", k), *([] if k in kept else [("recompute", k, 0)]), ("backward", k)]
    assert replay(SKIP, actions(*rows)).peak_bytes == 373
    solution = solve_chain(Problem(chain=SKIP, budget_bytes=380))
    assert (solution.status, solution.schedule, solution.gap) == ("unknown", None, None)
    assert solution.shortage is not None and math.isfinite(solution.lower_bound_seconds)
    enough = solve_chain(Problem(chain=SKIP, budget_bytes=solution.shortage.minimum_budget_bytes))
    assert enough.schedule is not None
    assert bound_seconds(SKIP, 100) == math.inf
    assert solve_chain(Problem(chain=SKIP, budget_bytes=100)).status == "infeasible"


@pytest.mark.parametrize(("budget", "status"), [(5, "infeasible"), (15, "unknown")])
def test_what_one_method_cannot_meet_another_may(budget: int, status: str) -> None:
    solution = solve_chain(Problem(chain=equal_stages(3), budget_bytes=budget), "keep_all")
    assert solution.status == status
    assert solution.shortage is not None and solution.shortage.minimum_budget_bytes == 16


def test_schedules_that_fit_and_are_not_accepted_prove_nothing() -> None:
    problem = Problem(chain=equal_stages(3), budget_bytes=16, accepts=lambda schedule: False)
    for solver in ("auto", "rotor", "ilp", "exhaustive"):
        assert solve_chain(problem, solver).status == "unknown"


def test_a_frontier_over_a_link_is_one_by_its_program_too() -> None:
    link = Link(to_host_bytes_per_second=4.0, to_device_bytes_per_second=4.0)
    solutions = frontier(equal_stages(3, (4,)), "offload_ilp", 6.0, link)
    assert solutions and all(solution.schedule is not None for solution in solutions)
