"""A stage that keeps a choice of what it saves computes the same, bit for bit, and lets go of the rest."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.op_graph import Choice, StageOps
from profiler.recomputation.selection import Selection
from profiler.recomputation.selective_call import SelectiveCall
from profiler.trace.partition import choose_stages
from profiler.trace.stage_dataflow import stage_ops_of
from profiler.trace.step_trace import trace_step
from profiler.workload.workload import Workload

WIDTH = 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU()
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(self.norm(x))))


class Drawing(Mlp):
    """Three dropouts, one of them without a module."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.act(self.first(nn.functional.dropout(x, 0.3))), 0.5)
        return nn.functional.dropout(self.second(hidden), 0.1)


class InPlace(nn.Module):
    """BatchNorm, ReLU in place and a sum in place: values with several versions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.norm(self.first(x)))
        hidden = self.second(hidden)
        hidden += x
        return torch.tanh(hidden)


class Views(nn.Module):
    """Attention: splits, transposes and views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.view(4, -1, 2, WIDTH // 2).transpose(1, 2) for each in self.projection(x).split(WIDTH, -1))
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return x + mixed.transpose(1, 2).reshape(x.shape)


KINDS: dict[str, Callable[[], nn.Module]] = {"mlp": Mlp, "drawing": Drawing, "in_place": InPlace, "views": Views}


class Whole(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x * 1.0)


def made(kind: str) -> tuple[nn.Module, Tensor, StageOps]:
    torch.manual_seed(0)
    model = Whole(KINDS[kind]())
    inputs = torch.randn(16, WIDTH, requires_grad=True)
    workload = Workload(model=model, inputs=inputs, loss=lambda y: y.square().sum())
    trace = trace_step(workload)
    return model.stage, inputs.detach(), stage_ops_of(trace, choose_stages(trace, ["stage"])[0])


def results(stage: nn.Module, inputs: Tensor, selection: Selection | None) -> dict[str, Any]:
    """Output, gradients, buffers and random state after a step from the same start."""
    start = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    torch.manual_seed(1)
    stage.zero_grad()
    x = inputs.clone().requires_grad_(True)
    if selection is None:
        output = stage(x)
    else:
        call = SelectiveCall(stage, selection)
        output = call.run(stage.forward, (x,), {})
        assert call.diverged is None
    output.square().sum().backward()
    found = {"output": output.detach(), "input": x.grad, "random": torch.get_rng_state()}
    found |= {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in stage.named_buffers()}
    for name, buffer in stage.named_buffers():
        buffer.copy_(start[name])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_any_set_of_ops_can_run_again(kind: str) -> None:
    stage, inputs, ops = made(kind)
    expected = results(stage, inputs, None)
    draw = random.Random(0)
    everything = frozenset(range(len(ops.ops)))
    sets = [everything, *(frozenset(k for k in everything if draw.random() < 0.5) for _ in range(20))]
    for rerun in sets:
        found = results(stage, inputs, Selection.of(ops, rerun))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), sorted(rerun)


def test_the_dataflow_of_an_mlp_is_that_of_its_ops() -> None:
    _, _, ops = made("mlp")
    kinds = [op.kind for op in ops.ops if op.allocates]
    assert kinds == ["native_layer_norm", "addmm", "gelu", "addmm", "add"]
    norm, first, gelu, _, total = (op for op in ops.ops if op.allocates)
    assert [op.module for op in (norm, first, gelu, total)] == ["norm", "first", "act", ""]
    saved = {ops.storages[n].op for n, s in enumerate(ops.storages) if s.saved and s.op >= 0}
    positions = {op.kind: k for k, op in enumerate(ops.ops) if op.allocates}
    assert saved == {positions["native_layer_norm"], ops.ops.index(first), positions["gelu"]}
    sizes = {ops.storages[n].size_bytes for n in (*first.allocates, *gelu.allocates)}
    assert sizes == {16 * 4 * WIDTH * 4}


def test_to_drop_what_gelu_made_runs_gelu_again_and_nothing_else() -> None:
    _, _, ops = made("mlp")
    gelu = next(k for k, op in enumerate(ops.ops) if op.kind == "gelu")
    choice = Choice.dropping(ops, [gelu])
    assert choice.rerun == {gelu}
    first = next(k for k, op in enumerate(ops.ops) if op.kind == "addmm")
    norm = next(k for k, op in enumerate(ops.ops) if op.kind == "native_layer_norm")
    assert Choice.dropping(ops, [gelu, first]).rerun == {gelu, first}
    assert Choice.of(ops, ()).rerun == {norm, first, gelu}


def test_what_is_not_kept_is_gone_after_forward_and_after_backward() -> None:
    stage, inputs, ops = made("mlp")
    gone: list[weakref.ref[Any]] = []
    act = stage.get_submodule("act")
    act.register_forward_hook(lambda _, __, output: gone.append(weakref.ref(output.untyped_storage())))
    gelu = next(k for k, op in enumerate(ops.ops) if op.kind == "gelu")
    selection = Selection.of(ops, {gelu})
    gc.disable()
    try:
        output = SelectiveCall(stage, selection).run(stage.forward, (inputs.clone().requires_grad_(True),), {})
        assert gone[0]() is None
        output.sum().backward()
        second = SelectiveCall(stage, selection).run(stage.forward, (inputs.clone().requires_grad_(True),), {})
        held = weakref.ref(second.untyped_storage())
        del second  # A forward without a backward leaves nothing behind either.
        assert held() is None
    finally:
        gc.enable()


def test_a_call_that_runs_other_ops_keeps_the_rest_and_says_where() -> None:
    stage, inputs, ops = made("mlp")
    selection = Selection.of(ops, frozenset(range(len(ops.ops))))
    expected = {}
    for other in (False, True):
        stage.act = nn.SiLU()
        stage.zero_grad()
        x = inputs.clone().requires_grad_(True)
        call = SelectiveCall(stage, selection)
        output = call.run(stage.forward, (x,), {}) if other else stage(x)
        output.square().sum().backward()
        assert call.diverged == (next(k for k, op in enumerate(ops.ops) if op.kind == "gelu") if other else None)
        expected[other] = [x.grad, *(p.grad for p in stage.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(expected[False], expected[True], strict=True))
