"""The parts of the graph search: every order they make replays, and none is better than the oracle's."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.random_graphs import random_tiny_graph, random_training_graph
from solvers.graph import exhaustive, quick_orders
from solvers.graph.lower_bound import smallest_working_set
from solvers.graph.moments import MomentSearch, MomentsProgram, NeighbourhoodSearch, first_moments
from solvers.graph.order_merging import OrderMerging, TemplateProgram, template_of
from solvers.graph.orders import Incumbent, IndexedGraph, keep_what_fits, peak_profile, schedule_of, seconds_of
from solvers.highs import Program
from solvers.problem.examples import training_graph
from solvers.problem.simulator import replay
from tests.support.graph_checks import optimum_seconds, with_once

SEEDS = range(40)


def middle_budget(indexed: IndexedGraph) -> int:
    low, high = exhaustive.smallest_peak(indexed), int(peak_profile(indexed, range(indexed.count)).max())
    return (low + high) // 2


@pytest.mark.parametrize("seed", SEEDS)
def test_demand_and_eviction_make_orders_that_replay(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    budget, rerunnable = middle_budget(indexed), np.ones(indexed.count, dtype=bool)
    made = [
        order
        for power in quick_orders.POWERS
        if (order := quick_orders.eviction_order(indexed, budget, rerunnable, power)) is not None
    ]
    for order in made:
        assert replay(indexed.graph, schedule_of(indexed, order)).peak_bytes <= budget
        assert seconds_of(indexed, order) >= optimum_seconds(indexed, budget) - 1e-9
    for order in quick_orders.orders_on_demand(indexed, rerunnable):
        replay(indexed.graph, schedule_of(indexed, order))


@pytest.mark.parametrize("seed", SEEDS)
def test_eviction_runs_nothing_again_that_must_run_once(seed):
    """Neither outputs that nothing reads any more, nor what dropped outputs are made from."""
    indexed = IndexedGraph(with_once(random_training_graph(40, seed), seed, 10))
    least, most = smallest_working_set(indexed)[0], int(peak_profile(indexed, range(indexed.count)).max())
    rerunnable = ~indexed.once
    for share in (0.1, 0.3, 0.6):
        order = quick_orders.eviction_order(indexed, least + int(share * (most - least)), rerunnable)
        if order is not None:
            replay(indexed.graph, schedule_of(indexed, order))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_repair_is_never_slower_and_stays_in_the_budget(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    budget = middle_budget(indexed)
    for order in quick_orders.orders_on_demand(indexed, np.ones(indexed.count, dtype=bool)):
        repaired = keep_what_fits(indexed, order, budget)
        replay(indexed.graph, schedule_of(indexed, repaired))
        assert seconds_of(indexed, repaired) <= seconds_of(indexed, order)
        if peak_profile(indexed, order).max() <= budget:
            assert peak_profile(indexed, repaired).max() <= budget


def everything(count: int) -> list[int]:
    """A template in which every node may run again before each first run and at the end."""
    return [v for t in range(count + 1) for v in (*range(t), t) if v < count]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_template_of_everything_is_as_good_as_the_oracle_unless_that_leaves_rising_order(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    budget = middle_budget(indexed)
    best = exhaustive.solve(indexed, budget)
    assert best is not None
    template = template_of(indexed, [everything(indexed.count), best])
    program = TemplateProgram(indexed, budget, template)
    answer = program.program.solve(time_limit_seconds=20.0, start=program.encode(best))
    assert answer.values is not None
    order = program.order(answer.values)
    assert replay(indexed.graph, schedule_of(indexed, order)).peak_bytes <= budget
    assert seconds_of(indexed, order) == pytest.approx(optimum_seconds(indexed, budget), rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_template_that_holds_the_smallest_order_finds_a_peak_as_small(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    smallest_bytes, keep_all = exhaustive.smallest_peak(indexed), list(range(indexed.count))
    smallest = exhaustive.solve(indexed, smallest_bytes)
    assert smallest is not None
    program = TemplateProgram(
        indexed,
        int(peak_profile(indexed, keep_all).max()),
        template_of(indexed, [everything(indexed.count), smallest]),
        smallest_peak=True,
    )
    start = program.encode(keep_all)
    answer = program.program.solve(time_limit_seconds=20.0, start=start)
    assert start is not None and answer.values is not None
    assert peak_profile(indexed, program.order(answer.values)).max() == smallest_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_an_order_is_a_solution_of_the_programs_that_it_is_encoded_for(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    budget = middle_budget(indexed)
    best = exhaustive.solve(indexed, budget)
    assert best is not None
    incumbent = Incumbent(indexed, budget, gap=0.0)
    moments = MomentsProgram(indexed, budget, first_moments(incumbent), np.ones(indexed.count, dtype=bool))
    template = TemplateProgram(indexed, budget, list(best))
    for program, values in ((moments.program, moments.encode(best)), (template.program, template.encode(best))):
        assert values is not None
        for variable, value in enumerate(values):
            program.fix(variable, float(value))
        assert program.solve(time_limit_seconds=5.0).status == "optimal"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_moments_program_bounds_all_schedules(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    for budget in (exhaustive.smallest_peak(indexed), middle_budget(indexed)):
        optimum = optimum_seconds(indexed, budget)
        for rerunnable in (indexed.rerunnable, np.ones(indexed.count, dtype=bool)):
            program = MomentsProgram(indexed, budget, list(range(indexed.count)), rerunnable)
            answer = program.program.solve(time_limit_seconds=20.0)
            assert answer.bound * program.unit_seconds <= optimum * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seed", [1, 2])
def test_moves_improve_and_keep_the_budget(seed):
    graph = random_training_graph(60, seed)
    indexed = IndexedGraph(graph)
    profile = peak_profile(indexed, range(indexed.count))
    incumbent = Incumbent(indexed, int((indexed.working_bytes.max() + profile.max()) // 2), gap=0.0)
    rerunnable = indexed.rerunnable
    for order in quick_orders.orders_on_demand(indexed, rerunnable):
        incumbent.offer(order, "demand")
    start = incumbent.seconds
    merging, improvement, rounds = (
        OrderMerging(incumbent),
        NeighbourhoodSearch(incumbent),
        MomentSearch(incumbent),
    )
    for step in (merging.step, improvement.step, lambda: rounds.step(10.0), merging.step):
        before = incumbent.seconds
        step()
        assert incumbent.seconds <= before
    assert incumbent.order is not None and incumbent.seconds < start
    replayed = replay(graph, schedule_of(indexed, incumbent.order))
    assert replayed.peak_bytes <= incumbent.budget_bytes
    assert incumbent.bound_seconds <= replayed.seconds * (1 + 1e-6)


def test_a_program_says_when_it_is_infeasible():
    program = Program()
    variable = program.variable()
    program.row([(variable, 1.0)], lower=2.0)
    answer = program.solve(time_limit_seconds=5.0)
    assert (answer.status, answer.values, answer.bound) == ("infeasible", None, float("inf"))


def test_a_chain_by_hand():
    """Four unit ops and their backwards in 4 bytes beside the gradient: known from the oracle, found by each part."""
    indexed = IndexedGraph(training_graph(4))
    budget = exhaustive.smallest_peak(indexed)
    order = quick_orders.eviction_order(indexed, budget, indexed.rerunnable)
    assert order is not None and peak_profile(indexed, order).max() <= budget
