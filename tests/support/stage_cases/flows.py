"""The dataflow of a case's stage, as the profiler reads it from a traced step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from profiler.op_graph import StageOps
from profiler.trace.partition import choose_stages
from profiler.trace.stage_dataflow import stage_ops_of
from profiler.trace.step_trace import trace_step
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload
from tests.support.stage_cases.registry import Case, without_leaves


class _Whole(nn.Module):
    """A model of one stage."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor) -> Any:
        return self.stage(*without_leaves(inputs))


def _total(output: Any) -> Tensor:
    return sum((t.real.float().sum() for t in tensors_in(output) if t.requires_grad), torch.zeros(()))


def flow_of(made: Case) -> StageOps:
    """What the ops of a case's stage read and make."""
    stage, inputs = made.make()
    trace = trace_step(Workload(model=_Whole(stage), inputs=inputs, loss=_total))
    return stage_ops_of(trace, choose_stages(trace, ["stage"])[0])
