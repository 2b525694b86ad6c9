"""A guard refuses a call wherever something that tracing took for granted is another, and says what."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_outputs import BaseModelOutput

import planner
from profiler.recomputation import module_state
from profiler.trace.captures import CallGuard, differing_attributes
from profiler.workload.workload import Workload

SLOPE = 0.5


class Block(nn.Module):
    """Depends on attributes, a container, a global and plain arguments."""

    def __init__(self, rate: float = 0.1, number: int = 0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(rate)
        self.number, self.scales = number, [1.0, 2.0]

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.dropout(self.linear(x)) * scale * self.scales[0] * SLOPE


def set_global(value: float) -> None:
    globals()["SLOPE"] = value


CHANGES: dict[str, tuple[Callable[[Block], object], str]] = {
    "a rate": (lambda block: setattr(block.dropout, "p", 0.2), "modules hold something else"),
    "the mode": (lambda block: block.eval(), "modules hold something else"),
    "a container": (lambda block: block.scales.append(3.0), "modules hold something else"),
    "a hook": (lambda block: block.linear.register_forward_hook(lambda *_: None), "modules hold something else"),
    "a frozen parameter": (lambda block: block.linear.bias.requires_grad_(False), "other parameters are trained"),
    "a global": (lambda block: set_global(0.25), "a global"),
}
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "another shape": ((torch.randn(3, 4),), {}),
    "other strides": ((torch.randn(4, 2).t(),), {}),
    "another type": ((torch.randn(2, 4, dtype=torch.float64),), {}),
    "a gradient": ((torch.randn(2, 4, requires_grad=True),), {}),
    "a plain argument": ((torch.randn(2, 4),), {"scale": 2.0}),
    "another kind of number": ((torch.randn(2, 4),), {"scale": True}),
}


def test_the_same_call_passes() -> None:
    block = Block()
    guard = CallGuard(block, (torch.randn(2, 4),), {})
    block(torch.randn(2, 4))
    assert guard.refusal((torch.randn(2, 4),), {}) == ""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_module_is_refused(name: str) -> None:
    block, (change, said) = Block(), CHANGES[name]
    guard = CallGuard(block, (torch.randn(2, 4),), {})
    assert guard.refusal((torch.randn(2, 4),), {}) == ""
    try:
        change(block)
        assert said in guard.refusal((torch.randn(2, 4),), {})
    finally:
        set_global(0.5)


@pytest.mark.parametrize("name", CALLS)
def test_other_arguments_are_refused(name: str) -> None:
    guard = CallGuard(Block(), (torch.randn(2, 4),), {})
    assert "it is called with" in guard.refusal(*CALLS[name])


def test_what_was_written_and_is_as_it_was_passes() -> None:
    block = Block()
    guard = CallGuard(block, (torch.randn(2, 4),), {})
    for _ in range(2):
        block.dropout.p, rate = 0.2, block.dropout.p
        assert "modules hold something else" in guard.refusal((torch.randn(2, 4),), {})
        block.dropout.p = rate
        assert guard.refusal((torch.randn(2, 4),), {}) == ""


def test_a_change_is_found_where_python_does_not_count_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from 3.13 on."""
    monkeypatch.setattr(module_state, "_VERSIONS_TELL", False)
    monkeypatch.setattr(module_state, "dict_version", lambda _: 0)
    test_what_was_written_and_is_as_it_was_passes()


def test_settings_of_torch_by_which_ops_are_chosen_are_refused() -> None:
    guard = CallGuard(Block(), (torch.randn(2, 4),), {})
    with torch.autocast("cpu", torch.bfloat16):
        assert "torch's settings" in guard.refusal((torch.randn(2, 4),), {})
    with sdpa_kernel(SDPBackend.MATH):
        assert "torch's settings" in guard.refusal((torch.randn(2, 4),), {})
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert guard.refusal((torch.randn(2, 4),), {}) == ""
    finally:
        torch.set_num_threads(threads)


def test_modules_of_one_structure_differ_in_the_attributes_that_differ() -> None:
    assert differing_attributes(Block(), Block()) == frozenset()
    assert differing_attributes(Block(), Block(rate=0.3, number=2)) == {".number", "dropout.p"}
    assert differing_attributes(Block(), nn.Linear(4, 4)) is None


@dataclasses.dataclass
class Record:
    values: Tensor
    scale: float = 1.0


class Holder:
    def __init__(self, values: Tensor, scale: float = 1.0) -> None:
        self.values, self.scale, self.owner = values, scale, self


class Pair(NamedTuple):
    values: Tensor
    scale: float = 1.0


MAKERS: dict[str, Callable[..., Any]] = {
    "dataclass": Record,
    "object": Holder,
    "named tuple": Pair,
    "ordered dict": lambda values, scale=1.0: OrderedDict(values=values, scale=scale),
    "model output": lambda values, scale=1.0: BaseModelOutput(last_hidden_state=values, attentions=(values * scale,)),
    "list of dataclasses": lambda values, scale=1.0: [Record(values, scale), Record(values, scale)],
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_arguments_made_anew_are_the_same_while_what_is_in_them_is(make: Callable[..., Any]) -> None:
    module, values = nn.Linear(3, 3), torch.ones(2, 3)
    guard = CallGuard(module, (make(values),), {})
    assert guard.refusal((make(values + 1),), {}) == ""
    assert guard.refusal((make(torch.ones(3, 3)),), {}) != ""
    if make is not MAKERS["model output"]:
        assert guard.refusal((make(values, 2.0),), {}) == "it is called with other arguments"


class TakesRecord(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, record: Record) -> Record:
        return Record(record.values + self.down(torch.relu(self.up(record.values))) * record.scale, record.scale)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TakesRecord() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        record = Record(x)
        for block in self.blocks:
            record = block(record)
        return record.values


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_blocks_that_take_a_dataclass_run_as_the_programs_of_their_plan() -> None:
    torch.manual_seed(0)
    model = Chain()
    work = Workload(model=model, inputs=torch.randn(512, 16), loss=lambda y: y.square().sum())
    plan = planner.solve(planner.profile(work), "70%")
    assert any(action.option for action in plan.schedule.actions)  # It runs again as a program.
    with planner.apply(model, plan):
        assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes


def test_what_holds_for_one_module_holds_for_one_like_it_as_long_as_the_first_is_as_it_was() -> None:
    one, other, args = Block(), Block(), (torch.randn(2, 4),)
    guard = CallGuard(one, args, {})
    assert guard.holds_for_another(other, (), args, {})
    one.dropout.p = other.dropout.p = 0.2  # Alike, and not as captured.
    assert not guard.holds_for_another(other, (), args, {})
    one.dropout.p = other.dropout.p = 0.1
    assert guard.holds_for_another(other, (), args, {})
    assert not guard.holds_for_another(other, (), (torch.randn(3, 4),), {})
    other.number = 1
    assert not guard.holds_for_another(other, (), args, {})
    assert guard.holds_for_another(other, (".number",), args, {})
    other.linear.bias.requires_grad_(False)  # Its gradient is made, and not taken.
    assert guard.holds_for_another(other, (".number",), args, {})
    one.linear.bias.requires_grad_(False)
    frozen = CallGuard(one, args, {})
    assert frozen.holds_for_another(other, (".number",), args, {})
    other.linear.bias.requires_grad_(True)
    assert not frozen.holds_for_another(other, (".number",), args, {})
    one.linear.bias.requires_grad_(True)
    assert guard.holds_for_another(other, (".number",), args, {})
    other.linear.register_parameter("bias", None)
    assert not guard.holds_for_another(other, (".number",), args, {})
