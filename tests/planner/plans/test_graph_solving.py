"""Orders of a call's ops keep the budget by their own replay, and the first difference of two graphs is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner.plans.call_programs import first_difference, order_within
from planner.step_problem import StepProblem, problem_of_call
from profiler.step_graph import StepRuns
from tests.support.chain_steps import AROUND, KIB, chain_step

SIZE = 100 * KIB
STEP = chain_step(layers=8)
BESIDE = replace(AROUND, forward_bytes=SIZE, backward_bytes=SIZE, loss_bytes=SIZE)


def too_small(problem: StepProblem) -> StepProblem:
    """The problem, whose graph counts one storage too few."""
    return replace(problem, graph=replace(problem.graph, resident_bytes=problem.graph.resident_bytes - SIZE))


def found(budget_bytes: int, *, counts_too_few: bool = False) -> StepRuns:
    problem = problem_of_call(STEP, BESIDE)
    problem = too_small(problem) if counts_too_few else problem
    return order_within(budget_bytes, STEP, BESIDE, problem, time_limit_seconds=2)


def seconds_again(runs: StepRuns) -> float:
    return sum(STEP.ops[ordinal].seconds for ordinal in runs.again.elements())


def test_an_order_keeps_its_budget_where_its_graph_counts_too_little() -> None:
    """The first order that is found there needs seven storages, and six are to be had."""
    assert [seconds_again(found(count * SIZE)) for count in (7, 6)] == [4, 7]
    runs = found(6 * SIZE, counts_too_few=True)
    assert seconds_again(runs) == 7
    assert BESIDE.peak_bytes(STEP, runs) <= 6 * SIZE


def test_a_budget_that_nothing_fits_is_refused_with_what_is_known_to_fit() -> None:
    with pytest.raises(planner.Infeasible) as refused:
        found(3 * SIZE)
    assert BESIDE.peak_bytes(STEP, found(refused.value.minimum_budget_bytes)) == refused.value.minimum_budget_bytes
    with pytest.raises(planner.Infeasible) as nothing:
        found(refused.value.minimum_budget_bytes - SIZE, counts_too_few=True)
    assert nothing.value.minimum_budget_bytes == refused.value.minimum_budget_bytes
    assert (refused.value.proven, nothing.value.proven) == (True, False)


def test_the_first_difference_of_two_graphs_is_named() -> None:
    other = replace(STEP, ops=(STEP.ops[0], replace(STEP.ops[1], reads=()), *STEP.ops[2:]))
    wider = replace(STEP, storages=(replace(STEP.storages[0], size_bytes=2 * SIZE), *STEP.storages[1:]))
    assert first_difference(STEP, STEP) == first_difference(STEP, wider, sizes_differ=True) == ""
    assert "other arguments" in first_difference(STEP, other)
    assert f"makes [{2 * SIZE}] bytes" in first_difference(STEP, wider)
    assert "where it had layer_7" in first_difference(STEP, chain_step(layers=7))
