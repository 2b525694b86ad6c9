"""Captured graph problems: bytes against sums by hand, storages counted once, and the files that are committed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.capture import PROBLEMS, RANDOM, Entry, compact, drawn, save, table
from benchmarks.op_graph import SPLIT_BYTES, Model, build, capture, scaled, trace
from benchmarks.random_graphs import random_training_graph
from solvers.graph.orders import IndexedGraph, schedule_of
from solvers.problem.graph import Graph
from solvers.problem.simulator import Replay, replay

README = table((PROBLEMS / "README.md").read_text())


def vectors(width: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda size: (torch.randn(size, width), torch.randint(classes, (size,)))


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 8, 8), torch.randint(5, (size,))


def convolutional(inplace: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=inplace),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=inplace),
        nn.Flatten(),
        nn.Linear(512, 5),
    )


class Viewed(nn.Module):
    """The perceptron's layers, with views, an in-place ReLU and a running mean between them."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x[:]).relu_().view(-1, 2, 4)
        self.mean.mul_(0.9).add_(hidden.detach().flatten(1).mean(0))
        return self.second(hidden.transpose(0, 2).transpose(0, 2).flatten(1))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def unmeasured(model: Model, batch: Callable[[int], tuple[Tensor, Tensor]], size: int, split: int) -> Graph:
    traced = trace(model, batch, size)
    return build(traced, dict.fromkeys((op.name for op in traced.ops), 1.0), split)


def in_list_order(graph: Graph) -> Replay:
    return replay(graph, schedule_of(IndexedGraph(graph), range(len(graph.nodes))))


def test_a_small_model_is_captured_with_bytes_of_one_batch_and_seconds_of_another():
    graph = capture(lambda: convolutional(True), images, size=4, timed_size=2)
    replay = in_list_order(graph)
    assert len(replay.timeline) == len({entry.action for entry in replay.timeline})
    assert replay.seconds == graph.unplanned_seconds > 0
    assert next(node for node in graph.nodes if node.name == "relu1").output_bytes == 4 * 8 * 8 * 8 * 4


def test_a_perceptron_by_hand():
    # Batch 1000; 4 inputs, 8 hidden, 3 classes. Bytes of a tensor of the hidden width: 32000; of the classes: 12000.
    graph = unmeasured(perceptron, vectors(4, 3), 1000, SPLIT_BYTES)
    parameters, batch = 4 * (4 * 8 + 8 + 8 * 3 + 3), 1000 * (4 * 4 + 8)
    assert graph.resident_bytes == parameters + batch + 4  # and the loss's gradient, 1
    forward = [node.output_bytes for node in graph.nodes if node.side == "forward"]
    # Two products with a ReLU between, log-softmax, and the loss with the weight that it is divided by.
    assert forward == [32000, 32000, 12000, 12000, 8]
    # The most is alive when the ReLU's gradient is made: the ReLU's output, the gradient that comes in, the one that
    # goes out, the gradients of the second layer, the loss, and its gradient.
    assert in_list_order(graph).peak_bytes == parameters + batch + 3 * 32000 + 4 * (8 * 3 + 3) + 8 + 4


def test_views_and_updates_of_buffers_make_no_nodes():
    viewed, plain = (unmeasured(model, vectors(4, 3), 100, SPLIT_BYTES) for model in (Viewed, perceptron))
    assert (viewed.nodes, viewed.outputs) == (plain.nodes, plain.outputs)
    assert viewed.resident_bytes == plain.resident_bytes + 8 * 4


def test_an_in_place_relu_is_counted_as_one_apart():
    inplace = unmeasured(lambda: convolutional(True), images, 4, SPLIT_BYTES)
    assert inplace == unmeasured(lambda: convolutional(False), images, 4, SPLIT_BYTES)


def test_what_stays_until_the_end_is_the_gradients_and_the_loss():
    graph = unmeasured(lambda: convolutional(True), images, 4, 0)
    size = {node.name: node.output_bytes for node in graph.nodes}
    gradients = sum(parameter.nbytes for parameter in convolutional(True).parameters())
    assert sum(size[name] for name in graph.outputs) == gradients + 4


def test_statistics_do_not_keep_what_a_batch_norm_returns():
    graph = unmeasured(lambda: convolutional(True), images, 4, 0)
    output = next(node for node in graph.nodes if node.name == "batch_norm1")
    readers = [node.name for node in graph.nodes if "batch_norm1" in node.inputs]
    assert (output.output_bytes, output.transient_bytes) == (4 * 8 * 64 * 4, 2 * 8 * 4)
    assert readers == ["batch_norm1_saved", "relu1"]


def test_small_parts_of_ops_make_no_nodes_and_hide_no_bytes():
    whole = unmeasured(lambda: convolutional(True), images, 4, 0)
    merged = unmeasured(lambda: convolutional(True), images, 4, 2048)
    assert len(merged.nodes) < len(whole.nodes)
    assert merged.resident_bytes > whole.resident_bytes
    assert in_list_order(merged).peak_bytes >= in_list_order(whole).peak_bytes


class Scaled(nn.Module):
    """One op on parameters alone, one that reads the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.exp().T


def test_seconds_grow_with_the_batch_where_an_op_reads_it():
    large, small = trace(Scaled, vectors(4, 3), 30), trace(Scaled, vectors(4, 3), 10)
    seconds = scaled({op.name: 1.0 for op in small.ops}, large, small, 3.0)
    assert (seconds["exp"], seconds["mm"], seconds["_log_softmax"]) == (1.0, 3.0, 3.0)


def test_a_model_whose_ops_depend_on_the_batch_is_refused():
    class Fickle(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            scores = super().forward(input)
            return scores.tanh() if len(input) > 2 else scores.sigmoid()

    with pytest.raises(ValueError, match="expected the same ops at both batch sizes"):
        capture(lambda: Fickle(4, 3), vectors(4, 3), size=4, timed_size=2)


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_have_the_nodes_asked_for_and_none_in_vain(seed):
    count = 50 + 17 * seed
    graph = random_training_graph(count, seed)
    needed = {*graph.outputs, *(name for node in graph.nodes for name in node.inputs)}
    assert len(graph.nodes) == len(needed) == count
    assert [node.side for node in graph.nodes] == sorted((node.side for node in graph.nodes), reverse=True)
    assert in_list_order(graph).seconds == graph.unplanned_seconds
    assert graph == random_training_graph(count, seed) != random_training_graph(count, seed + 1)


@pytest.mark.parametrize("name", sorted(set(RANDOM) - {"random-2000-seed4"}))
def test_the_random_files_come_from_their_seeds(name):
    assert compact(drawn(name).graph) == (PROBLEMS / f"{name}.json").read_text()


def test_a_new_capture_takes_the_place_of_the_earlier_one(tmp_path):
    other = Entry("gpt4-10.json", random_training_graph(10, 0), "other", "", "")
    save(tmp_path, "gpt4", other)
    for count in (12, 11):
        save(tmp_path, "unet", Entry(f"unet-{count}.json", random_training_graph(count, 0), "step", "4 (2)", "today"))
    assert {path.name for path in tmp_path.glob("*.json")} == {"gpt4-10.json", "unet-11.json"}
    assert list(table((tmp_path / "README.md").read_text())) == ["unet-11.json", "gpt4-10.json"]


def test_the_table_lists_the_files():
    assert sorted(README) == sorted(path.name for path in PROBLEMS.glob("*.json"))


@pytest.mark.parametrize("file", sorted(README))
def test_a_committed_file_is_what_its_row_says(file):
    graph = Graph.from_dict(json.loads((PROBLEMS / file).read_text()))
    columns = [cell.strip() for cell in README[file].strip("|").split("|")]
    replay = in_list_order(graph)
    assert Entry(file, graph, columns[1], columns[2], columns[-1]).row() == README[file]
    assert columns[5] == f"{replay.peak_bytes / 2**30:.3f}"
    assert str(len(graph.nodes)) == columns[3] and f"-{columns[3]}" in file
    assert {node.side for node in graph.nodes} == {"forward", "backward"}
    assert min(node.seconds for node in graph.nodes) >= 1e-6
    assert (PROBLEMS / file).stat().st_size < 400_000
