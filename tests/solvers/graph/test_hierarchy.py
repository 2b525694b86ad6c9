"""The hierarchy of blocks against the oracle, against its own chain model, and on graphs that are hardly chains."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.random_graphs import random_tiny_graph, random_training_graph
from solvers.chain.rotor import Table
from solvers.graph import hierarchy
from solvers.graph.blocks import BlockMenus, cut_into_blocks, first_backward_node, node_of
from solvers.graph.hierarchy import BlockChain
from solvers.graph.orders import Incumbent, IndexedGraph, peak_profile, schedule_of, seconds_of
from solvers.problem.examples import training_graph
from solvers.problem.graph import Graph, Node
from solvers.problem.simulator import replay
from tests.support.graph_checks import checked_seconds, optimum_seconds, telling_budgets, unplanned_peak
from tests.support.nightly import by_day


def searched(indexed: IndexedGraph, budget_bytes: int) -> Incumbent:
    incumbent = Incumbent(indexed, budget_bytes, gap=1e-9)
    hierarchy.solve(incumbent, Table)
    return incumbent


def layers(times: list[float], *, reads_entry: bool = True, skip: bool = False) -> Graph:
    """Layers of two ops beside a residual connection; the backward reads what is inside, and the layer's entry or not.

    ``skip``: the last backward of all reads the output of the first and of the last layer's inner op.
    """
    nodes = [Node(name="x0", seconds=1.0, output_bytes=4)]
    for k, time in enumerate(times):
        nodes += [
            Node(name=f"in{k}", seconds=time, output_bytes=16, inputs=(f"x{k}",)),
            Node(name=f"out{k}", seconds=3.0, output_bytes=8, inputs=(f"in{k}",)),
            Node(name=f"x{k + 1}", seconds=0.5, output_bytes=4, inputs=(f"x{k}", f"out{k}")),
        ]
    nodes.append(Node(name=f"g{len(times)}", seconds=1.0, output_bytes=4, inputs=(f"x{len(times)}",), side="backward"))
    for k in reversed(range(len(times))):
        entry = (f"x{k}",) if reads_entry else ()
        nodes += [
            Node(name=f"dout{k}", seconds=3.0, output_bytes=8, inputs=(f"out{k}", f"g{k + 1}"), side="backward"),
            Node(name=f"din{k}", seconds=2.0, output_bytes=16, inputs=(f"in{k}", f"dout{k}"), side="backward"),
            Node(name=f"w{k}", seconds=1.0, output_bytes=1, inputs=(*entry, f"din{k}"), side="backward"),
            Node(name=f"g{k}", seconds=1.0, output_bytes=4, inputs=(f"din{k}", f"g{k + 1}"), side="backward"),
        ]
    if skip:
        nodes.append(
            Node(name="end", seconds=1.0, output_bytes=1, inputs=("in0", f"in{len(times) - 1}"), side="backward")
        )
    return Graph(nodes=tuple(nodes), outputs=tuple(f"w{k}" for k in range(len(times))), resident_bytes=7)


def one_block_a_layer(graph: Graph):
    """Blocks of layers, however many nodes may run together."""
    indexed = IndexedGraph(graph)
    return indexed, cut_into_blocks(indexed, 0.13)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.slow
def test_no_answer_beats_the_oracle_on_tiny_graphs(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    for budget in telling_budgets(indexed):
        order = searched(indexed, budget).order
        checked_seconds(indexed, budget, order)


@pytest.mark.parametrize("depth", [3, 4, 5, 6])
def test_a_chain_of_single_ops_is_solved_to_the_optimum(depth):
    indexed = IndexedGraph(training_graph(depth))
    for budget in range(4, unplanned_peak(indexed) + 1):
        order = searched(indexed, budget).order
        seconds = checked_seconds(indexed, budget, order)
        assert seconds == optimum_seconds(indexed, budget)


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_day(range(5), [0, 3]))
@pytest.mark.parametrize("share", [0.15, 0.4, 0.7])
def test_orders_of_random_training_steps_replay_within_the_budget(seed, share):
    indexed = IndexedGraph(random_training_graph(40, seed))
    low, high = int(indexed.working_bytes.max()), unplanned_peak(indexed)
    budget = int(low + share * (high - low))
    incumbent = searched(indexed, budget)
    if incumbent.order is None:
        return
    result = replay(indexed.graph, schedule_of(indexed, incumbent.order))
    assert result.peak_bytes <= budget
    assert result.seconds == pytest.approx(incumbent.seconds)


@pytest.mark.slow
def test_random_training_steps_with_most_of_the_memory_have_an_answer():
    for seed in range(5):
        indexed = IndexedGraph(random_training_graph(40, seed))
        assert searched(indexed, int(0.85 * unplanned_peak(indexed))).order is not None


def test_the_blocks_are_the_layers_with_their_own_backwards():
    indexed, blocks = one_block_a_layer(layers([2.0] * 8))
    names = [[indexed.graph.nodes[v].name for v in (*block.forward, *block.backward)] for block in blocks]
    assert ["in3", "out3", "x4", "dout3", "din3", "w3", "g3"] in names
    assert all(block.lasting_bytes == 0 for block in blocks)


def test_blocks_that_are_alike_are_solved_once():
    indexed, blocks = one_block_a_layer(layers([2.0] * 8))
    menus = BlockMenus(indexed)
    assert len({id(menus.menu(block)) for block in blocks}) == menus.solved
    assert menus.solved == 4 < len(blocks)  # x0, the first layer (nobody reads its gradient), the last, and all between


def test_blocks_with_other_seconds_are_solved_on_their_own():
    indexed, blocks = one_block_a_layer(layers([2.0, 2.0, 2.0, 2.1, 50.0, 2.0, 2.0, 2.0]))
    menus, alike = BlockMenus(indexed), BlockMenus(IndexedGraph(layers([2.0] * 8)))
    for block in blocks:
        menus.menu(block)
        alike.menu(block)
    assert menus.solved == alike.solved + 1


def test_a_menu_goes_from_keeping_all_to_keeping_nothing():
    indexed, blocks = one_block_a_layer(layers([2.0] * 8))
    block = next(block for block in blocks if indexed.graph.nodes[block.forward.start].name == "in3")
    options = BlockMenus(indexed).menu(block)
    kept = [{indexed.graph.nodes[node_of(block, place)].name for place in option.kept} for option in options]
    assert kept[0] == {"in3", "out3"} and kept[-1] == set()
    assert {"out3"} in kept  # 8 bytes that save 3 seconds and, with in3 run for itself, nothing else
    again = [sum(indexed.seconds[node_of(block, place)] for place in option.backward_runs) for option in options]
    assert again[0] == 7.0 and max(again) >= 12.0


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("reads_entry", [False, True])
@pytest.mark.parametrize("times", [[2.0] * 8, [1.0, 5.0, 2.0, 2.0, 7.0, 1.0, 2.0, 4.0]])
def test_the_chain_foretells_peak_and_seconds_where_cuts_are_narrow(times, reads_entry, skip):
    indexed, blocks = one_block_a_layer(layers(times, reads_entry=reads_entry, skip=skip))
    assert (sum(block.lasting_bytes for block in blocks) > 0) == skip
    model = BlockChain(indexed, blocks, BlockMenus(indexed))
    table = Table(model.chain)
    assert len(table.points()) > 5
    for point in table.points():
        order = model.order(table.schedule(point))
        assert peak_profile(indexed, order).max() <= point.peak_bytes
        assert (
            seconds_of(indexed, order) <= point.seconds + indexed.seconds.sum() - model.chain.unplanned_seconds + 1e-9
        )


@pytest.mark.parametrize("reads_entry", [False, True])
def test_the_chain_knows_the_unplanned_peak(reads_entry):
    """Also where a block's entry is freed as soon as its forward has read it."""
    indexed, blocks = one_block_a_layer(layers([2.0] * 8, reads_entry=reads_entry))
    points = Table(BlockChain(indexed, blocks, BlockMenus(indexed)).chain).points()
    assert points[-1].peak_bytes == unplanned_peak(indexed)


def test_without_time_a_menu_has_its_ends():
    indexed, blocks = one_block_a_layer(layers([2.0] * 8))
    block = next(block for block in blocks if indexed.graph.nodes[block.forward.start].name == "in3")
    options = BlockMenus(indexed, lambda: 0.0).menu(block)
    assert [len(option.kept) for option in (options[0], options[-1])] == [2, 0]
    assert {len(option.kept) for option in options} == {2, 0}


def test_with_all_the_memory_nothing_runs_again():
    for graph in (layers([2.0] * 8), training_graph(20), random_training_graph(60, 3)):
        indexed = IndexedGraph(graph)
        assert searched(indexed, unplanned_peak(indexed)).seconds == pytest.approx(graph.unplanned_seconds)


def test_deep_layers_run_in_a_small_part_of_the_memory():
    indexed = IndexedGraph(layers([2.0] * 40))
    budget = unplanned_peak(indexed) // 5
    incumbent = searched(indexed, budget)
    assert incumbent.order is not None
    assert replay(indexed.graph, schedule_of(indexed, incumbent.order)).peak_bytes <= budget
    assert incumbent.seconds < 1.5 * indexed.seconds.sum()


def test_labels_that_mean_nothing_do_not_matter():
    graph = layers([2.0] * 12)
    plain = Graph(
        nodes=tuple(replace(node, side="forward") for node in graph.nodes),
        outputs=graph.outputs,
        resident_bytes=graph.resident_bytes,
    )
    indexed = IndexedGraph(plain)
    assert abs(first_backward_node(indexed) - first_backward_node(IndexedGraph(graph))) <= 2
    incumbent = searched(indexed, unplanned_peak(indexed) // 2)
    assert incumbent.order is not None
    assert replay(plain, schedule_of(indexed, incumbent.order)).peak_bytes <= unplanned_peak(indexed) // 2


def test_where_there_is_nothing_to_cut_there_is_no_answer():
    star = Graph(nodes=(Node(name="a", seconds=1.0, output_bytes=1), Node(name="b", seconds=1.0, output_bytes=1)))
    incumbent = searched(IndexedGraph(star), 2)
    assert incumbent.order is None or incumbent.seconds == 2.0
    assert searched(IndexedGraph(Graph(nodes=star.nodes[:1])), 1).seconds in (1.0, math.inf)


def test_no_node_is_lost_or_doubled():
    for graph in (layers([2.0] * 8), training_graph(7), random_training_graph(100, 1), random_tiny_graph(5)):
        indexed = IndexedGraph(graph)
        for share in hierarchy.SHARES:
            blocks = cut_into_blocks(indexed, share)
            nodes = [v for block in blocks for v in block.forward]
            nodes += [v for block in reversed(blocks) for v in block.backward]
            assert np.array_equal(nodes, np.arange(indexed.count))


def with_far_output(graph: Graph, size_bytes: int, readers: tuple[str, ...]) -> Graph:
    """The graph with one more node in front, which these nodes read."""
    far = Node(name="far", seconds=1.0, output_bytes=size_bytes)
    nodes = (replace(node, inputs=(*node.inputs, "far")) if node.name in readers else node for node in graph.nodes)
    return replace(graph, nodes=(far, *nodes))


@pytest.mark.parametrize(
    ("size_bytes", "readers", "cut"),
    [
        (30, tuple(f"in{k}" for k in range(8)), True),  # an encoder's output, which all layers read
        (30, ("in0", "in7"), False),  # a skip connection over all layers
        (1, ("in0", "in7"), True),  # the same, but small
    ],
)
def test_what_may_as_well_last_does_not_stand_in_the_way_of_cuts(size_bytes, readers, cut):
    plain = layers([1.0] * 8)
    large = replace(plain, nodes=tuple(replace(n, output_bytes=10 * n.output_bytes) for n in plain.nodes))
    graph = with_far_output(large, size_bytes, readers)
    _, blocks = one_block_a_layer(graph)
    assert (len(blocks) >= 8) == cut
    assert not cut or 0 in blocks[0].lasting or 0 in blocks[0].boundary
