"""What a function that is run again holds, for how long, and what hooks and changes around it see of that."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner import recompute
from profiler.recomputation.saved_tensors import RerunError

WIDTH = 32


def test_an_exception_leaves_nothing_behind():
    def fails(x: Tensor) -> Tensor:
        h = x.exp()
        alive.append(weakref.ref(h.sin().untyped_storage()))
        raise RuntimeError("no more")

    alive: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no more"):
            recompute(fails)(x)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None  # type: ignore[attr-defined]  # without a stub
    assert [reference() for reference in alive] == [None, None]
    recompute(torch.sin)(x).sum().backward()


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_outlives_the_graph(backward):
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(64, requires_grad=True)
        inner = x * 2
        watched = weakref.ref(inner.untyped_storage())
        wrapped = recompute(lambda t: recompute(torch.exp)(t.sin()).cos())
        y = wrapped(inner).sum()
        del inner
        if backward:
            y.backward()
        del y
        assert watched() is None
    finally:
        gc.enable()


def test_what_it_does_not_need_again_is_not_held():
    """The last op reads a large tensor, and nothing asks for its result."""
    large = torch.ones(1000)
    watched = weakref.ref(large.untyped_storage())
    x = torch.ones(1000, requires_grad=True)

    def add(t: Tensor) -> Tensor:
        return t.exp().sin() + taken.pop()

    taken = [large]
    y = recompute(add)(x)
    del large
    assert watched() is None
    y.sum().backward()


def test_what_only_needless_ops_read_goes_when_backward_has_used_it():
    """Two branches; the second one's results go before the first one's are made, whoever else has read them."""

    def measured(reader: Callable[[Tensor], Any]) -> int:
        def branches(x: Tensor) -> Tensor:
            first, second = x.repeat(1, 64).exp().sin(), x.repeat(1, 64).exp()
            reader(second)
            return first.sum() + second.sin().sum()

        model = nn.Linear(WIDTH, WIDTH)
        work = planner.Workload(model=model, inputs=torch.randn(64, WIDTH), loss=recompute(branches))
        return planner.measure(work, repeats=1).peak_bytes

    assert measured(lambda t: t.mean()) == measured(lambda t: None)


def test_saved_tensor_hooks_around_it_see_what_it_reads():
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor.clone()

    x = torch.randn(5, 7, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = recompute(lambda t: torch.sin(t.exp()).cos() * t)(x * 1)
    assert seen == [(5, 7)]
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((torch.sin(x.exp()).cos() * x).sum(), x)
    assert torch.equal(found, expected)


def test_saved_tensor_hooks_around_it_hold_the_parameters_that_it_saves():
    scale, x = nn.Parameter(torch.randn(4)), torch.randn(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        y = recompute(lambda t: (scale * t.exp()).sin())(x)
        expected = (scale * x.exp()).sin()
    scale.data = 2 * scale.data
    assert torch.equal(*(torch.autograd.grad(each.sum(), x)[0] for each in (y, expected)))


def test_an_input_changed_inside_before_hooks_around_it_can_copy_it_is_noticed():
    """The hooks get what is kept when the call is over: too late for its value as it was saved."""

    def doubling(t: Tensor, weight: Tensor) -> Tensor:
        y = t * weight
        with torch.no_grad():
            t.mul_(2)
        return y.exp()

    weight = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        y = recompute(doubling)(torch.ones(3), weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_input_changed_afterwards_is_noticed():
    x = torch.ones(3, requires_grad=True)
    inner = x * 2
    y = recompute(lambda t: (t + 1).exp().sin())(inner)
    with torch.no_grad():
        inner.add_(1)
    with pytest.raises(RerunError, match="changed in place"):
        y.sum().backward()
