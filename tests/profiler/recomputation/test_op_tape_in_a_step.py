"""What a step does around the tape: a backward inside, autocast, changes between forward and backward, exceptions."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.module_rerun import RERUN_DEPTH
from profiler.recomputation.saved_tensors import RerunError
from tests.support.op_cases.calls import Call, assert_exact
from tests.support.op_cases.registry import ROWS, WIDTH, Pair
from tests.support.op_cases.runs import total


def test_a_backward_inside_takes_what_is_still_there() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        y = x.exp()
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * slope

    call = Call(body, ["exp"])
    assert call.observer.again == []
    assert call.backward() == []
    assert_exact(body, ["exp"])


def test_what_a_backward_inside_has_made_again_is_recorded_no_further() -> None:
    """The double is there all the time; it has been made again for its exponential, which was gone."""

    def body(s: Pair, x: Tensor) -> Any:
        y = x * 2
        total = y.exp().sum()
        (slope,) = torch.autograd.grad(total, x, retain_graph=True)
        return (y + slope).exp()

    assert_exact(body, ["mul", "exp", "add"])


def test_autocast_around_backward_does_not_reach_what_runs_again() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return (x @ s.a.weight.detach()).exp() * 2

    gradients = []
    for kinds in ((), ("mm", "exp")):
        call = Call(body, kinds)
        with torch.autocast("cpu", torch.bfloat16):
            assert call.backward() == list(kinds)
        gradients.append(call.input.grad)
    assert torch.equal(*gradients)


def test_a_parameter_given_other_data_is_read_as_autograd_reads_it() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return (x * s.a.bias).exp() * 2

    gradients = []
    for kinds in ((), ("exp",)):
        call = Call(body, kinds)
        call.stage.get_parameter("a.bias").data = torch.full((WIDTH,), 3.0)
        call.backward()
        gradients.append(call.input.grad)
    assert torch.equal(*gradients)


def test_what_an_op_reads_again_must_not_have_changed() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return (x + s.a.bias.detach()).exp()

    call = Call(body, ["add", "exp"])
    with torch.no_grad():
        call.stage.get_parameter("a.bias").add_(1)
    with pytest.raises(RerunError, match="changed in place since; change it after backward"):
        call.backward()


def test_what_is_kept_must_not_have_changed_either() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        return (x * s.a.bias.detach()).exp()

    call = Call(body, ["exp"])
    with torch.no_grad():
        call.stage.get_parameter("a.bias").add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(16,\) is at version 2, expected version 1"):
        call.backward()


def surroundings() -> list[Any]:
    """What an exception must not leave otherwise."""
    return [
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),  # type: ignore[attr-defined]
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        RERUN_DEPTH.get(),
        torch.get_rng_state().tolist(),
    ]


class Broken(TorchDispatchMode):
    """An op that fails when it runs again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RERUN_DEPTH.get() and "bernoulli" in str(func):
            raise MemoryError("no room")
        return func(*args, **(kwargs or {}))


def test_an_op_that_fails_in_backward_leaves_nothing_behind() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        with torch.no_grad():
            mask = torch.bernoulli(torch.full((ROWS, WIDTH), 0.5))
        return (x * mask).exp()

    call = Call(body, ["full", "bernoulli", "mul", "exp"])
    loss = total(call.output)
    del call.output
    torch.rand(3)
    before = surroundings()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(MemoryError, match="no room"), Broken():
        loss.backward()
    assert surroundings() == before
    gc.collect()
    del loss
    assert call.alive == 0
