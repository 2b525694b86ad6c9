"""What ops of a graph cost, each measured by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import planner
from profiler.capture.joint_graph import capture
from profiler.capture.op_costs import costs_of


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
