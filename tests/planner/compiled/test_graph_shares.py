"""Several graphs of one step: their orders chosen together, against every choice tried by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from planner.compiled.graph_shares import GraphOption, GraphOptions, GraphTurns, choose_options, options_of
from planner.plans.graph_solving import GraphSearch
from planner.plans.refusals import NothingFound
from profiler.step_graph import StepGraph, StepOp, StepStorage
from profiler.step_replay import StepRuns, replay_step, runs_once


def option(seconds: float, forward_bytes: int, kept_bytes: int, backward_bytes: int) -> GraphOption:
    return GraphOption(
        runs=StepRuns((), ()),
        seconds=seconds,
        forward_bytes=forward_bytes,
        kept_bytes=kept_bytes,
        backward_bytes=backward_bytes,
    )


def graph(*options: GraphOption, returned: int = 0, gradient: int = 0, loss: int = 0) -> GraphOptions:
    return GraphOptions(options=options, returned_bytes=returned, gradient_bytes=gradient, loss_bytes=loss)


def test_a_step_of_two_graphs_by_hand():
    first, last = option(1.0, 10, 7, 12), option(2.0, 9, 4, 11)
    graphs = [graph(first, returned=1, gradient=2), graph(last, returned=3, gradient=5, loss=6)]
    turns = GraphTurns(graphs=(0, 1), resident_bytes=100)
    moments = [sum(size for _, size in moment) for moment in turns.moments(graphs, [[(first, None)], [(last, None)]])]
    forward_0, backward_0, forward_1, backward_1, loss, after = moments
    assert (forward_0, forward_1) == (100 + 10 + 3, 100 + 7 + 9 + 3)  # the last output of the step before
    assert loss == 100 + 7 + 4 + 6
    assert backward_1 == 100 + 7 + 11 + 3 + 3  # what it returned itself, and what the loop holds
    assert backward_0 == 100 + 12 + 1 + 3 + 5  # the gradients of the other graph
    assert after == 100 + 2 + 5 + 3
    assert turns.peak_bytes(graphs, [first, last]) == max(moments)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_fastest_of_all(seed: int):
    draw = random.Random(seed)
    graphs = [
        graph(
            *(option(draw.uniform(1, 2), *(draw.randrange(5, 60) for _ in range(3))) for _ in range(3)),
            returned=draw.randrange(5),
            gradient=draw.randrange(9),
            loss=draw.randrange(20),
        )
        for _ in range(3)
    ]
    steps = [GraphTurns(graphs=(0, 1, 2), resident_bytes=10), GraphTurns(graphs=(0, 2, 2), resident_bytes=10)]
    tried = [
        (
            max(turns.peak_bytes(graphs, taken) for turns in steps),
            sum(taken[g].seconds for t in steps for g in t.graphs),
        )
        for taken in itertools.product(*(each.options for each in graphs))
    ]
    for budget_bytes in (min(peak for peak, _ in tried), sorted(peak for peak, _ in tried)[9]):
        taken = choose_options(budget_bytes, graphs, steps)
        assert max(turns.peak_bytes(graphs, taken) for turns in steps) <= budget_bytes
        seconds = sum(taken[g].seconds for turns in steps for g in turns.graphs)
        assert seconds == pytest.approx(min(seconds for peak, seconds in tried if peak <= budget_bytes))
    with pytest.raises(NothingFound) as refusal:
        choose_options(min(peak for peak, _ in tried) - 1, graphs, steps)
    assert refusal.value.minimum_budget_bytes == min(peak for peak, _ in tried)


def test_options_keep_more_or_fewer_bytes_between_the_programs():
    """Five ops in a row, each saved for a backward op of its own; all but the first are made again in time."""
    forward = [
        StepOp(name=f"f{k}", op="aten.sin.default", reads=(k - 1,) if k else (), makes=(k,), seconds=1.0)
        for k in range(5)
    ]
    storages = [StepStorage(size_bytes=100, returned=k == 4) for k in range(5)]
    storages += [StepStorage(size_bytes=100, of_loss=True)]
    backward = [
        StepOp(
            name=f"b{k}",
            op="aten.mul.Tensor",
            side="backward",
            reads=(k, 9 - k if k < 4 else 5),
            makes=(10 - k if k < 4 else 6,),
            seconds=1.0,
        )
        for k in reversed(range(5))
    ]
    storages += [StepStorage(size_bytes=100, gradient=k == 4) for k in range(5)]
    step = StepGraph(ops=(*forward, *backward), storages=tuple(storages), resident_bytes=0)
    found = options_of(step, 10_000, GraphSearch(time_limit_seconds=2.0), loss_copies=1)
    kept = [each.kept_bytes for each in found.options]
    assert kept == sorted(kept) and kept[0] < kept[-1] <= replay_step(step, runs_once(step), held=False).between_bytes
    assert min(each.seconds for each in found.options) == 10.0 < found.options[0].seconds
    assert (found.returned_bytes, found.gradient_bytes, found.loss_bytes) == (100, 100, 100)
