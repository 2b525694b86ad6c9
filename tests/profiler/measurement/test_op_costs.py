"""What ops of a graph cost, each measured by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.capture.joint_graph import capture
from profiler.measurement.op_costs import costs_of, with_host_arguments


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
    workload = planner.Workload(model=_DiagonalsInPlace(), inputs=torch.randn(8, 8, 16), loss=torch.sum)
    graph = capture(workload)
    costs = costs_of(graph, dict.fromkeys(graph.makers.values()), torch.device("cpu"))
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
