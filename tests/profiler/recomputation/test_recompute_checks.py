"""What is made again is held against what the forward made, where that is anything at all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.recomputation.recompute_checks import CheckedCall
from profiler.recomputation.selection import Selection

_LIBRARY = torch.library.Library("recompute_checks", "DEF")
_RUNS = itertools.count()


def _other_each_time(x: Tensor) -> tuple[Tensor, Tensor]:
    """Its second result is what lay in memory, and another in each run."""
    return x * 2, torch.full((2,), next(_RUNS))


def _saves(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
    assert len(ctx.saved_tensors) == 1
    return gradient * 2


for _name, _result in (("attention", "rng_state"), ("attention_of_others", "statistics"), ("no_such", "rng_state")):
    _LIBRARY.define(f"{_name}(Tensor x) -> (Tensor output, Tensor {_result})")
    _LIBRARY.impl(_name, _other_each_time, "CPU")
    torch.library.register_autograd(f"recompute_checks::{_name}", _backward, setup_context=_saves, lib=_LIBRARY)


class _Stage(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.op(x)
        return output.relu()


@pytest.mark.parametrize(("name", "wrong"), [("attention", set()), ("attention_of_others", {4}), ("no_such", {4})])
def test_what_a_kernel_leaves_unwritten_is_not_compared(name: str, wrong: set[int]) -> None:
    op = getattr(torch.ops.recompute_checks, name).default
    stage, selection = _Stage(op), Selection((str(op), "aten.relu.default"), frozenset({0}), ordinals=(4, 5))
    call = CheckedCall(stage, selection)
    output = call.run(stage.forward, (torch.ones(3, requires_grad=True),), {})
    assert call.diverged is None and not call.ended_early
    output.sum().backward()
    assert call.wrong == wrong
