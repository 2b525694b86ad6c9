"""Running a stage so that a choice of its ops runs again, and comparing it with the plain run."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from profiler.op_graph import Choice, ChoiceError, StageOps
from profiler.recomputation.selection import Selection
from profiler.recomputation.selective_call import SelectiveCall
from profiler.tensors.tensor_trees import tensors_in
from profiler.trace.partition import choose_stages
from profiler.trace.stage_dataflow import stage_ops_of
from profiler.trace.step_trace import trace_step
from profiler.workload.workload import Workload
from tests.support.op_cases.registry import Case


class Whole(nn.Module):
    """A model of one stage, which is given no leaves."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor) -> Any:
        return self.stage(*inner(inputs))


def inner(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor * 1 if tensor.requires_grad else tensor for tensor in inputs)


def total(output: Any) -> Tensor:
    """A number whose gradient differs at every element of every output."""
    found = torch.zeros(())
    for number, tensor in enumerate(tensors_in(output), 1):
        if tensor.requires_grad:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.linspace(0.5, 1.5, real.numel()).reshape(real.shape)
            found = found + number * (real.float() * weights).sum()
    return found


def flow_of(made: Case) -> StageOps:
    """The dataflow of the stage, as the profiler reads it from a traced step."""
    stage, inputs = made.make()
    model = Whole(stage)
    work = Workload(model=model, inputs=inputs, loss=total)
    trace = trace_step(work)
    return stage_ops_of(trace, choose_stages(trace, ["stage"])[0])


Outcome = dict[str, list[Tensor | None]]


def run(made: Case, selection: Selection | None) -> tuple[Outcome, SelectiveCall | None]:
    """Outputs, gradients, buffers and random state after one step; plain without a selection."""
    stage, inputs = made.make()
    torch.manual_seed(5)
    call = None
    if selection is None:
        output = stage(*inner(inputs))
    else:
        call = SelectiveCall(stage, selection)
        output = call.run(stage.forward, inner(inputs), {})
    values: list[Tensor | None] = [tensor.detach().clone() for tensor in tensors_in(output)]
    loss = total(output)
    del output
    loss.backward()
    leaves = [*stage.parameters(), *(tensor for tensor in inputs if tensor.requires_grad)]
    outcome: Outcome = {
        "values": values,
        "gradients": [leaf.grad for leaf in leaves],
        "buffers": [buffer.clone() for buffer in stage.buffers()],
        "random": [torch.get_rng_state()],
    }
    return outcome, call


def differences(left: Outcome, right: Outcome) -> list[str]:
    """What is not the same, bit for bit."""
    return [name for name in left if not all(map(_same, left[name], right[name]))]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    same = torch.equal(a, b)
    return same or (a.dtype == b.dtype and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)))


def closed_choices(flow: StageOps, seed: int, count: int) -> list[Choice]:
    """Random choices of what to keep, and of what to drop, that can be; each with other ops."""
    draw = random.Random(seed)
    found: dict[frozenset[int], Choice] = {}
    outside = [k for k, storage in enumerate(flow.storages) if storage.op < 0]
    for _ in range(count):
        share = draw.choice([0.1, 0.4, 0.8])
        kept = [*outside, *(k for k in range(len(flow.storages)) if draw.random() < share)]
        dropped = [k for k in range(len(flow.ops)) if draw.random() < share]
        for make, numbers in ((Choice.of, kept), (Choice.dropping, dropped)):
            try:
                choice = make(flow, numbers)
            except ChoiceError:
                continue
            found[choice.rerun] = choice
    return list(found.values())


def everything_once(flow: StageOps) -> set[int]:
    """The ops of all that can be made again without an op that must not run again."""
    saved = [k for k, storage in enumerate(flow.storages) if storage.saved and not storage.always_live]
    outside = [k for k, storage in enumerate(flow.storages) if storage.op < 0]
    found: set[int] = set()
    for dropped in saved:
        try:
            found |= flow.rerun([*outside, *(k for k in saved if k != dropped)])
        except ChoiceError:
            continue
    return found
