"""The dataflow of a stage says in which order autograd saves its storages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from profiler.json_files import from_plain, to_plain
from profiler.op_graph import StageOps
from profiler.trace.partition import choose_stages
from profiler.trace.stage_dataflow import stage_ops_of
from profiler.trace.step_trace import trace_step
from profiler.workload.workload import Workload
from tests.support.small_blocks import Residual

WIDTH = 16


class Two(nn.Module):
    """A stage with something before it, so that its input is no part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.stage = Residual(dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(self.first(x))


def saved_in_a_run(model: Two, inputs: Tensor) -> list[int]:
    """Bytes of the storage under each tensor that autograd saves in the stage; -1 for a parameter's."""
    found: list[int] = []
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found.append(-1 if storage.data_ptr() in parameters else storage.nbytes())
        return tensor.detach()

    given = model.first(inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.stage(given)
    return found


def test_saves_stand_in_the_order_in_which_autograd_makes_them() -> None:
    model, inputs = Two(), torch.randn(8, WIDTH)
    trace = trace_step(Workload(model=model, inputs=inputs, loss=lambda y: y.square().mean()))
    ops = stage_ops_of(trace, choose_stages(trace, ["stage"])[0])
    sizes = [-1 if number < 0 else ops.storages[number].size_bytes for number in ops.saves]
    assert sizes == saved_in_a_run(model, inputs)
    made = {number for number, storage in enumerate(ops.storages) if storage.saved and storage.op >= 0}
    assert made < {number for number in ops.saves if number >= 0}  # and the stage's input
    assert from_plain(StageOps, to_plain(ops)) == ops
