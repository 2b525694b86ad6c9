"""What a second run is given is as it was for the first one: autocast then casts, and autograd saves, as often."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.module_rerun import CallState, detached, rerun_keeping, rerun_until_saved

WIDTH = 8


class Heads(nn.Module):
    """Three projections of one input, as attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (head(x) for head in self.heads)
        return first * second + third


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # Of the hooks, and of autograd's own.
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_cut_off_from_its_graph_a_tensor_is_the_same_and_no_leaf() -> None:
    made = torch.ones(WIDTH, requires_grad=True) * 2
    with torch.no_grad():
        cut = detached({"x": [made]})["x"][0]
    assert cut.requires_grad and not cut.is_leaf and not cut._is_view()
    assert cut.untyped_storage()._cdata == made.untyped_storage()._cdata
    made.add_(0)
    assert cut._version == made._version


@pytest.mark.parametrize("tensor", [torch.ones(WIDTH), torch.ones(WIDTH, requires_grad=True)])
def test_a_tensor_without_a_graph_is_left_alone(tensor: Tensor) -> None:
    assert detached([tensor])[0] is tensor


@pytest.mark.parametrize("leaf", [True, False])
def test_under_autocast_a_second_run_casts_as_often_as_the_first(leaf: bool) -> None:
    stage, given = Heads(), torch.randn(4, WIDTH, requires_grad=True)
    x = given if leaf else given * 1
    saved: list[Tensor] = []
    first, second = _Ops(), _Ops()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = CallState(stage, torch.device("cpu"), draws_random=False)
        with first, torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: x):
            stage(x)
    (again,) = detached([x])
    with second:
        kept, _ = rerun_keeping(stage.forward, state, (again,), {})
    assert second.names[: len(first.names)] == first.names
    assert first.names.count("aten._to_copy.default") == (7 if leaf else 9)
    assert len(kept) == len(saved) and all(torch.equal(a, b) for a, b in zip(kept, saved, strict=True))
    assert len(rerun_until_saved(stage.forward, state, (again,), {}, len(saved))) == len(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_rerun_sees_a_buffer_in_the_size_of_the_first_run_and_leaves_it_in_its_own(dtype: torch.dtype) -> None:
    module = nn.Identity()
    module.register_buffer("seen", torch.zeros(0, dtype=dtype))
    state = CallState(module, torch.device("cpu"), draws_random=False, changing=("seen",))
    seen = module.get_buffer("seen").resize_(3).fill_(1)
    with state.reinstated():
        assert seen.numel() == 0
        seen.resize_(5).fill_(0)
    assert module.get_buffer("seen") is seen and seen.tolist() == [1, 1, 1]
    seen.resize_(7)  # Nothing has kept its storage from growing.


COUNTS = {"calls": 0}


class Hooked(nn.Module):
    """Hooks inside it count on parameters, in a closure, in a global and on an object that a method belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.outside, number = list[int](), 0

        def count(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal number
            number += 1
            self_outside.append(number)
            COUNTS["calls"] += 1
            for parameter in map(_any, module.parameters()):
                parameter.calls = getattr(parameter, "calls", 0) + 1

        self_outside = self.outside
        self.line.register_forward_hook(count)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)

    def counts(self) -> list[Any]:
        return [[*self.outside], COUNTS["calls"], *(_any(p).__dict__.copy() for p in self.parameters())]


def _any(value: Any) -> Any:
    return value


def test_what_hooks_count_in_a_first_run_a_second_one_does_not_count_again() -> None:
    stage, x = Hooked(), torch.randn(4, WIDTH)
    for calls in (1, 2):
        state = CallState(stage, x.device, draws_random=False)
        stage(x)
        counted = stage.counts()
        assert counted[0] == list(range(1, calls + 1)) and counted[2] == {"calls": calls}
        rerun_keeping(stage, state, (x,), {})
        assert stage.counts() == counted
