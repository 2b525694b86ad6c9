"""The dataflow of a captured call as plain data, by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from profiler.step_graph import StepGraph, StepOp
from profiler.trace.captured_call import capture_call
from profiler.trace.joint_graph import CHANGES, step_graph_of

ROWS, WIDTH, OUT = 8, 16, 4


def graph_of(model: nn.Module, inputs: Tensor) -> StepGraph:
    return step_graph_of(capture_call(model, model.forward, (inputs,), {}).graph)


def op_named(graph: StepGraph, kind: str) -> StepOp:
    (op,) = [op for op in graph.ops if op.kind == kind]
    return op


class Reshaping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh().view(-1, 2).exp()


def test_views_are_no_ops_and_who_reads_one_reads_its_storage() -> None:
    graph = graph_of(Reshaping(), torch.randn(ROWS, WIDTH))
    assert [op.kind for op in graph.ops if op.side == "forward"] == ["mm", "tanh", "exp"]
    mm, tanh, exp = graph.ops[:3]
    assert (mm.module, tanh.reads, exp.reads) == ("layer", mm.makes, tanh.makes)
    sizes = [graph.storages[number].size_bytes for op in (mm, tanh, exp) for number in op.makes]
    assert sizes == 3 * [ROWS * OUT * 4]
    assert [graph.storages[op.makes[0]].returned for op in (mm, tanh, exp)] == [False, False, True]


def test_what_is_resident_and_what_backward_begins_and_ends_with() -> None:
    model = Reshaping()
    inputs = torch.randn(ROWS, WIDTH)
    graph = graph_of(model, inputs)
    assert graph.resident_bytes == inputs.nbytes + model.layer.weight.nbytes
    (of_loss,) = [number for number, storage in enumerate(graph.storages) if storage.of_loss]
    assert graph.storages[of_loss].size_bytes == ROWS * OUT * 4
    gradients = [storage.size_bytes for storage in graph.storages if storage.gradient]
    assert gradients == [model.layer.weight.nbytes]
    backward = [op for op in graph.ops if op.side == "backward"]
    assert of_loss in backward[0].reads and of_loss not in backward[-1].reads
    assert backward[-1].module == "layer"


class Counting(nn.Module):
    """Reads a buffer that it then changes, and normalizes by the batch."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, OUT)
        self.register_buffer("count", torch.zeros(OUT))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.norm(x)) * self.count.exp()
        self.count += 1
        return y


def test_what_reads_a_buffer_that_changes_runs_once_and_batch_norm_may_run_again() -> None:
    graph = graph_of(Counting(), torch.randn(ROWS, WIDTH))
    assert op_named(graph, "exp").once_reason == CHANGES
    assert op_named(graph, "_native_batch_norm_legit_functional").once_reason == ""
    assert op_named(graph, "addmm").once_reason == ""


class Several(nn.Module):
    """Returns several tensors, each with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, OUT + k) for k in range(12))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def test_gradients_of_outputs_come_in_their_order() -> None:
    sizes = [each.size_bytes for each in graph_of(Several(), torch.randn(ROWS, WIDTH)).storages if each.of_loss]
    assert sizes == [ROWS * (OUT + k) * 4 for k in range(12)]


class WritingAPart(nn.Module):
    """Writes into a part of a tensor: aten.copy of the part makes a storage like the whole one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[0].tanh_()
        return y


def test_storages_are_as_large_in_every_capture() -> None:
    graphs = [graph_of(WritingAPart(), torch.randn(ROWS, WIDTH)) for _ in range(2)]
    made = [[g.storages[op.makes[0]].size_bytes for op in g.ops if op.kind == "copy"] for g in graphs]
    assert made[0] == made[1] and made[0][0] == ROWS * OUT * 4
