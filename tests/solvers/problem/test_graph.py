"""Graph problems: what loads, what is refused by name, and what a replay finds."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest

from benchmarks.random_graphs import random_tiny_graph
from solvers.graph.orders import IndexedGraph, peak_profile, schedule_of
from solvers.problem.examples import training_graph
from solvers.problem.graph import Graph, Node
from solvers.problem.schedule import Action, Schedule
from solvers.problem.simulator import ReplayError, replay


def document() -> dict:
    return training_graph(2).to_dict()


def test_a_graph_survives_its_file():
    graph = random_tiny_graph(3)
    assert Graph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph


def spoiled(change) -> dict:
    data = copy.deepcopy(document())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["nodes"][0].update(inputs=["b0"]), "cycle, got f0 -> f1 -> b1 -> b0 -> f0"),
        (lambda d: d["nodes"][0].update(inputs=["f0"]), "cycle, got f0 -> f0"),
        (lambda d: d["nodes"].reverse(), "topological order"),
        (lambda d: d["nodes"][1].update(inputs=["gone"]), "missing node 'gone'"),
        (lambda d: d["nodes"][1].update(inputs=[["f0"]]), "expected str, got ['f0'] at nodes[1].inputs[0]"),
        (lambda d: d["nodes"][1].update(name="f0"), "duplicate name 'f0'"),
        (lambda d: d["nodes"][1].update(seconds=-1.0), "not negative, got -1.0"),
        (lambda d: d["nodes"][1].update(seconds=math.nan), "got nan"),
        (lambda d: d["nodes"][1].update(seconds=True), "got True"),
        (lambda d: d["nodes"][1].update(output_bytes=1.5), "expected int, got 1.5"),
        (lambda d: d["nodes"][1].update(transient_bytes=-1), "transient_bytes"),
        (lambda d: d["nodes"][1].update(side="up"), "got 'up' at nodes[1].side"),
        (lambda d: d["nodes"][1].update(speed=1), "got also nodes[1].speed"),
        (lambda d: d["nodes"][1].pop("seconds"), "expected a field seconds, got none at nodes[1]"),
        (lambda d: d["nodes"].append(7), "expected object, got 7 at nodes[4]"),
        (lambda d: d.update(nodes=[]), "at least one node"),
        (lambda d: d.update(nodes=3), "expected array, got 3 at nodes"),
        (lambda d: d.update(outputs=["gone"]), "missing node 'gone'"),
        (lambda d: d.update(outputs=[["f0"]]), "expected str, got ['f0'] at outputs[0]"),
        (lambda d: d.update(resident_bytes=-5), "resident_bytes"),
        (lambda d: d.update(version=9), "version 1"),
    ],
)
def test_what_is_wrong_is_named(change, said):
    with pytest.raises(ValueError, match=".*") as refused:
        Graph.from_dict(spoiled(change))
    assert said in str(refused.value)


def hand_made() -> Graph:
    """a (4 bytes, 3 transient) feeds b (1 byte) and c (2 bytes); resident 10."""
    return Graph(
        nodes=(
            Node(name="a", seconds=1.0, output_bytes=4, transient_bytes=3),
            Node(name="b", seconds=2.0, output_bytes=1, inputs=("a",)),
            Node(name="c", seconds=4.0, output_bytes=2, inputs=("a", "b")),
        ),
        outputs=("b", "c"),
        resident_bytes=10,
    )


def run(*steps: tuple[str, int]) -> Schedule:
    return Schedule(tuple(Action(op, node) for op, node in steps))  # type: ignore[arg-type]


def test_a_replay_by_hand():
    again = run(("run", 0), ("run", 1), ("free", 0), ("run", 0), ("run", 2), ("free", 0))
    result = replay(hand_made(), again)
    assert [moment.peak_bytes for moment in result.timeline] == [17, 15, 15, 18, 17, 17]
    assert [moment.after_bytes for moment in result.timeline] == [14, 15, 11, 15, 17, 13]
    assert (result.peak_bytes, result.seconds, again.nodes_run()) == (18, 8.0, [0, 1, 0, 2])
    assert [moment.before_bytes for moment in result.timeline] == [10, 14, 15, 11, 15, 17]
    assert result.peak_moment is result.timeline[3]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([("run", 1)], "without its inputs ['a']"),
        ([("run", 0), ("run", 0)], "whose output is alive"),
        ([("free", 0)], "not alive"),
        ([("forward", 0)], "a graph has no action 'forward'"),
        ([("run", 0), ("run", 1)], "'c' has never run"),
        ([("run", 0), ("run", 1), ("run", 2), ("free", 1)], "outputs ['b']"),
    ],
)
def test_a_schedule_that_does_not_run_is_refused(steps, said):
    with pytest.raises(ReplayError) as refused:
        replay(hand_made(), run(*steps))
    assert said in str(refused.value)


def test_first_runs_keep_the_order_of_the_nodes():
    nodes = (Node(name="a", seconds=1, output_bytes=1), Node(name="b", seconds=1, output_bytes=1))
    with pytest.raises(ReplayError, match="first run of 'b' comes before that of 'a'"):
        replay(Graph(nodes=nodes), run(("run", 1), ("run", 0)))


@pytest.mark.parametrize("seed", range(60))
def test_the_profile_of_an_order_is_what_the_replay_sees(seed):
    graph, rng = random_tiny_graph(seed), np.random.default_rng(seed)
    indexed = IndexedGraph(graph)
    order = list(range(indexed.count))
    for v in rng.integers(0, indexed.count, size=3):  # run some nodes again where their inputs have just run
        place = int(rng.integers(order.index(int(v)) + 1, len(order) + 1))
        order[place:place] = [*indexed.inputs[int(v)], int(v)]
    order = runnable(indexed, order)
    result = replay(graph, schedule_of(indexed, order))
    computed = [moment.peak_bytes for moment in result.timeline if moment.action.kind == "run"]
    assert computed == peak_profile(indexed, order).tolist()
    assert max(computed) == result.peak_bytes


def runnable(indexed: IndexedGraph, order: list[int]) -> list[int]:
    """The order without runs before a node's own first one, and first runs kept in the order of the nodes."""
    kept, fresh = [], 0
    for v in order:
        if v == fresh or (v < fresh):
            kept.append(v)
            fresh += v == fresh
    return kept
