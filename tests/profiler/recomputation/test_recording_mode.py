"""Only modules in which ops run again are recorded; others may run what they like, and pay nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.op_graph import StageOps
from profiler.recomputation.module_rerun import CallState
from profiler.recomputation.recomputed_tensors import RecomputedTensor
from profiler.recomputation.selection import ModuleSwitch, Selection, _nearest_parent, _switches
from profiler.recomputation.selective_call import SelectiveCall, rerun_selecting
from tests.support.op_cases.blocks import (
    ADD,
    BLOCK,
    DROPOUT,
    EMPTY,
    FIRST,
    FIRST_T,
    GELU,
    MUL,
    NORM,
    SPIED,
    Spy,
)
from tests.support.op_cases.registry import ROWS, WIDTH, Case
from tests.support.op_cases.runs import differences, flow_of, inner, run


@pytest.fixture(scope="module")
def flow() -> StageOps:
    return flow_of(BLOCK)


# Which modules are recorded -----------------------------------------------------------


@pytest.mark.parametrize(
    ("rerun", "recorded", "switches"),
    [
        # What a gelu makes is saved nowhere; what the dropout makes of it is, where it is read.
        ({GELU}, (GELU,), [ModuleSwitch("act.0", True, True)]),
        ({MUL}, DROPOUT, [ModuleSwitch("act.1", True, True), ModuleSwitch("second", None, True)]),
        # The noise is made in the first op; what changes it in place is recorded too, though it does not run again.
        ({EMPTY}, DROPOUT, [ModuleSwitch("act.1", True, True)]),
        ({NORM}, (NORM,), [ModuleSwitch("first", None, True), ModuleSwitch("norm", True, True)]),
        ({FIRST}, (FIRST_T, FIRST), [ModuleSwitch("act.0", None, True), ModuleSwitch("first", True, True)]),
        # The stage's own op: all modules in it end what the stage begins.
        (
            {ADD},
            (ADD,),
            [
                ModuleSwitch("", True, True),
                *(ModuleSwitch(m, False, False) for m in ("act.0", "act.1", "first", "norm", "second")),
            ],
        ),
        ((), (), []),
    ],
)
def test_what_is_recorded(
    flow: StageOps, rerun: Collection[int], recorded: tuple[int, ...], switches: list[ModuleSwitch]
) -> None:
    selection = Selection.of(flow, rerun)
    assert selection.ordinals == recorded
    assert selection.ops == tuple(flow.ops[ordinal].op for ordinal in recorded)
    assert {recorded[position] for position in selection.rerun} == set(rerun)
    assert list(selection.switches) == switches


def test_a_module_that_changes_what_another_one_makes_is_recorded() -> None:
    """Its ReLU does not run again; once it has run, what the linear layer made can only be kept."""
    made = Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)))
    flow = flow_of(made)
    assert [op.kind for op in flow.ops] == ["t", "addmm", "relu_", "t", "addmm"]
    selection = Selection.of(flow, {1})
    assert selection.ordinals == (0, 1, 2)
    assert selection.switches == (
        ModuleSwitch("0", True, True),
        ModuleSwitch("1", True, True),
        ModuleSwitch("2", None, True),
    )
    assert differences(run(made, None)[0], run(made, selection)[0]) == []


def test_turns_of_nested_modules() -> None:
    modules = {"", "a", "a.b.c", "a.b.c.d", "ab", "e.f"}
    assert _switches(modules, {"a", "a.b.c.d"}, {"a.b.c", "e"}) == (
        ModuleSwitch("a", True, True),
        ModuleSwitch("a.b.c", False, True),
        ModuleSwitch("a.b.c.d", True, True),
        ModuleSwitch("e", None, True),
    )
    assert _switches(modules, {"", "a"}, set()) == (
        ModuleSwitch("", True, True),
        ModuleSwitch("a.b.c", False, False),
        ModuleSwitch("ab", False, False),
        ModuleSwitch("e.f", False, False),
    )


def test_the_nearest_known_module_around() -> None:
    assert _nearest_parent("a.b.c", {"", "a"}) == "a"
    assert _nearest_parent("a.b.c", {"", "a", "a.b"}) == "a.b"
    assert _nearest_parent("ab.c", {"", "a"}) == ""
    assert _nearest_parent("a", {"", "a"}) == ""


# What recording sees ------------------------------------------------------------------


def modes_and_hooks(rerun: Collection[int]) -> dict[str, tuple[int, bool]]:
    stage, inputs = SPIED.make()
    call = SelectiveCall(stage, Selection.of(flow_of(SPIED), rerun))
    call.run(stage.forward, inner(inputs), {})
    assert call.diverged is None
    return {name: spy.seen[-1] for name, spy in stage.named_modules() if isinstance(spy, Spy)}


def test_neither_mode_nor_hooks_are_on_where_nothing_runs_again() -> None:
    nothing = (0, False)
    names = ["norm", "first", "second", "act.0", "act.1"]
    assert modes_and_hooks(()) == dict.fromkeys(names, nothing)
    # The spies' own modules, around those that are recorded, switch nothing.
    assert modes_and_hooks({ADD}) == {**dict.fromkeys(names, (1, True))}


class Nested(nn.Module):
    """Its own ops around a module without any to run again, around one with."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = Middle()

    def forward(self, x: Tensor) -> Tensor:
        return (self.outer(x.exp()) * 2).exp()


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sigmoid()
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes = [torch._C._len_torch_dispatch_stack()]
        y = self.inner(x.tanh())
        self.modes.append(torch._C._len_torch_dispatch_stack())
        return y.cos()


NESTED = Case(Nested)  # Ops: 0 exp; 1 tanh, 2 sigmoid, 3 cos; 4 mul, 5 exp.


class OnTop(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_mode_is_left_in_a_module_that_is_not_recorded_and_entered_again_below() -> None:
    selection = Selection.of(flow_of(NESTED), {0, 2})
    assert selection.switches[:2] == (ModuleSwitch("", True, True), ModuleSwitch("outer", False, True))
    stage, inputs = NESTED.make()
    call = SelectiveCall(stage, selection)
    call.run(stage.forward, inner(inputs), {})
    assert call.diverged is None
    assert stage.get_submodule("outer").modes == [0, 0]
    assert torch._C._len_torch_dispatch_stack() == 0
    plain, _ = run(NESTED, None)
    found, _ = run(NESTED, selection)
    assert differences(plain, found) == []


class UnderAMode(Nested):
    """The model's own mode is on where the recording mode would be left: that stays on, and records nothing."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        with OnTop():
            y = self.outer(y)
        return (y * 2).exp()


def test_below_a_mode_of_the_model_recording_pauses_and_the_mode_stays() -> None:
    made = Case(UnderAMode)
    selection = Selection.of(flow_of(made), {0, 2})
    plain, _ = run(made, None)
    found, call = run(made, selection)
    assert differences(plain, found) == []
    assert call is not None and call.diverged is None
    assert torch._C._len_torch_dispatch_stack() == 0


# Where the stage switches gradients off, brings hooks along, or runs again itself --------


class Gated(nn.Module):
    """Calls a module with gradients and without."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.act(x)
        return (self.act(x * 2) * gate).exp()


def test_a_module_called_without_gradients_is_not_recorded() -> None:
    made = Case(Gated)
    flow = flow_of(made)
    assert [(op.kind, op.module) for op in flow.ops[:3]] == [("gelu", ""), ("mul", ""), ("gelu", "act")]
    plain, _ = run(made, None)
    for rerun in ({2}, {1, 2}, {0, 1, 2, 3, 4}):
        found, call = run(made, Selection.of(flow, rerun))
        assert call is not None and call.diverged is None
        assert differences(plain, found) == []


class Hooked(nn.Module):
    """Has saved-tensor hooks of its own around a module."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()
        self.packed = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            y = self.act(x.exp()).exp()
        return y.sigmoid()

    def _pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor.detach()


def test_hooks_of_the_model_see_what_they_saw() -> None:
    """Those of the stage are put on once, and not again in a module whose saved tensors are looked at too."""
    made = Case(Hooked)
    stage, inputs = made.make()
    stage(*inner(inputs))
    assert stage.packed == 3  # What both exponentials make, and what gelu takes.
    flow = flow_of(made)
    selection = Selection.of(flow, range(len(flow.ops)))
    selection = replace(selection, switches=(*selection.switches, ModuleSwitch("act", None, True)))
    SelectiveCall(stage, selection).run(stage.forward, inner(inputs), {})
    assert stage.packed == 3 + 3


def test_a_call_that_runs_again_as_a_whole_is_recorded_as_well(flow: StageOps) -> None:
    stage, inputs = BLOCK.make()
    torch.manual_seed(5)
    state = CallState(stage, torch.device("cpu"), draws_random=True)
    given = inner(inputs)
    expected = stage(*given)
    selection = Selection.of(flow, {GELU, MUL})
    call, saved, output = rerun_selecting(stage.forward, stage, state, given, {}, selection)
    assert call.diverged is None
    assert torch.equal(output, expected)
    assert output.grad_fn is not None and output.grad_fn.name() == "_CutBackward"  # Not the rerun's graph.
    # Norm: input, weight, two statistics; first: input and weight; gelu and noise; second: the product and weight.
    assert sum(isinstance(each, RecomputedTensor) for each in saved) == 1
    (product,) = (each for each in saved if isinstance(each, RecomputedTensor))
    assert product.tensor().shape == (ROWS, 2 * WIDTH)


def test_a_module_that_stands_twice_in_a_stage_gets_its_forward_back() -> None:
    act = nn.GELU()
    stage = nn.Sequential(act, nn.Linear(WIDTH, WIDTH), act)
    switches = (ModuleSwitch("0", True, True), ModuleSwitch("2", True, True))
    selection = Selection(ops=("aten.gelu.default",) * 2, rerun=frozenset(), switches=switches, ordinals=(0, 1))
    SelectiveCall(stage, selection).run(stage.forward, (torch.ones(ROWS, WIDTH, requires_grad=True),), {})
    assert "forward" not in act.__dict__


def test_without_gradients_no_mode_stays_on(flow: StageOps) -> None:
    stage, inputs = BLOCK.make()
    with torch.no_grad():
        SelectiveCall(stage, Selection.of(flow, {GELU, *DROPOUT})).run(stage.forward, inputs, {})
    assert torch._C._len_torch_dispatch_stack() == 0
