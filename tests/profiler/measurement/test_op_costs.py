"""What ops of a graph cost, each measured by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from profiler.measurement.captured_stages import costs_of, measured_graph, with_host_arguments
from profiler.trace.captured_call import capture_call
from profiler.trace.joint_graph import CaptureError, JointGraph

CPU = torch.device("cpu")
WIDTH, ROWS = 32, 64


def graph_of(module: nn.Module, x: Tensor) -> JointGraph:
    return capture_call(module, module.forward, (x,), {}).graph


class _DiagonalsInPlace(nn.Module):
    """Writes into views of views: what is traced of that copies the storages under them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).triu()
        y[::2].diagonal(dim1=-2, dim2=-1).sigmoid_()
        z = y * 2
        z[::2, 2:][::2].diagonal(dim1=-2, dim2=-1).sigmoid_()
        return y * z


def test_ops_read_storages_as_large_as_in_the_step():
    graph = graph_of(_DiagonalsInPlace(), torch.randn(8, 8, 16))
    costs = costs_of(graph, dict.fromkeys(graph.makers.values()), CPU)
    scattered = {op.name: cost.made_bytes for op, cost in costs.items() if op.name.startswith("diagonal_scatter")}
    # The clone is of all that lies under the view, which is less than that of every second row alone.
    assert set(scattered.values()) == {(8 * 8 * 16 * 4,)}


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("_scaled_dot_product_efficient_attention_backward", True),
        ("_efficient_attention_backward", True),
        ("_scaled_dot_product_flash_attention_backward", False),
        ("_scaled_dot_product_cudnn_attention_backward", False),
    ],
)
def test_what_host_code_of_attention_reads_is_on_the_cpu(name, reader):
    op = getattr(torch.ops.aten, name).default
    names = [argument.name for argument in op._schema.arguments]
    given = {argument: torch.zeros((), dtype=torch.int64, device="meta") for argument in names}  # as on a device
    for positional in (len(names), 2):
        args, kwargs = with_host_arguments(
            op, tuple(given[argument] for argument in names[:positional]), {n: given[n] for n in names[positional:]}
        )
        found = {**dict(zip(names, args, strict=False)), **kwargs}
        assert found.keys() == given.keys()
        on_host = {argument for argument, value in found.items() if value.device.type == "cpu"}
        assert on_host == ({"philox_seed", "philox_offset"} if reader else set())
    assert all(value.device.type == "meta" for value in given.values())


class _Unfolding(nn.Module):
    """The gradient of unfold's input has the storage of the gradient of what it makes, which is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.unfold(self.layer(x).view(ROWS, 1, 4, WIDTH // 4), 2)


def test_storages_that_ops_make_larger_than_what_they_return_are_counted_whole():
    step = measured_graph(graph_of(_Unfolding(), torch.randn(ROWS, WIDTH)), CPU)
    (fold,) = [op for op in step.ops if op.kind == "col2im"]
    (made,) = [step.storages[number] for number in fold.makes]
    assert (made.traced_bytes, made.size_bytes) == (ROWS * WIDTH * 4, ROWS * (2 * 2) * (3 * (WIDTH // 4 - 1)) * 4)


class _Drawing(nn.Module):
    """Draws with probabilities that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.bernoulli(x.sigmoid()[:, :4])


def test_ops_are_measured_with_values_that_may_be_probabilities():
    step = measured_graph(graph_of(_Drawing(), torch.randn(ROWS, WIDTH)), CPU)
    assert any(op.kind == "bernoulli" for op in step.ops)


@torch.library.custom_op("planner_tests::above_one", mutates_args=())
def above_one(x: Tensor) -> Tensor:
    if x.min() <= 1:
        raise RuntimeError("a value of at most 1")
    return x.clone()


@torch.library.custom_op("planner_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("planner_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


for custom in (above_one, noisy, doubled):
    custom.register_fake(torch.empty_like)
    custom.register_autograd(lambda _, grad: grad.clone())


class _Picky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return above_one(torch.sigmoid(self.layer(x)) + 2)


def test_an_op_that_cannot_be_measured_by_itself_is_named():
    """It is measured with values between 0 and 1."""
    graph = graph_of(_Picky(), torch.randn(ROWS, WIDTH))
    with pytest.raises(CaptureError, match=r"planner_tests\.above_one.* cannot be measured by itself: .*at most 1"):
        measured_graph(graph, CPU)


class _Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(doubled(torch.sigmoid(noisy(self.layer(x)))))


def test_ops_of_other_libraries_run_again_only_if_they_make_the_same():
    step = measured_graph(graph_of(_Custom(), torch.randn(ROWS, WIDTH)), CPU)
    once = {op.kind: op.once_reason for op in step.ops}
    assert once["noisy"] == "a recomputation on the same tensors gave another result"
    assert not once["doubled"]
