"""What ops that run again read of a call's inputs is what it was in forward, or the call says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.recomputation.held_inputs import BatchCopies
from profiler.recomputation.saved_tensors import RerunError
from profiler.trace.call_program import BoundProgram, CallProgram
from profiler.trace.captured_call import capture_call
from profiler.trace.programs import StepOrder, order_of


class Gated(nn.Module):
    """Eager code saves what it makes of ``gate``, and not ``gate`` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.tanh(self.linear(x * gate.sigmoid()))


class Scaled(Gated):
    """Eager code saves ``gate`` as well."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x, gate) * gate


def program_of(module: nn.Module, args: tuple[Tensor, ...]) -> BoundProgram:
    """All of its forward runs again in backward."""
    captured = capture_call(module, module.forward, args, {})
    once = order_of(captured.graph)
    return CallProgram(captured, StepOrder(once.forward, [*once.forward, *once.backward])).bound(module)


def gradients(call: Callable[..., Tensor], change: Callable[[Any], object], kind: type[Gated] = Gated) -> list[Tensor]:
    """Of a step in which something is changed between forward and backward."""
    torch.manual_seed(0)
    module, x, gate = kind(), torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    y = call(module, x, gate)
    change({"x": x, "gate": gate, "weight": module.linear.weight, "bias": module.linear.bias})
    return list(torch.autograd.grad(y.square().sum(), [x, *module.parameters()]))


def planned(module: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    batch = BatchCopies((x, gate))
    return program_of(module, (x * 1, gate)).called((x * 1, gate), {}, batch, checked=True)


def eager(module: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    return module(x * 1, gate)


@pytest.mark.parametrize(
    "change", [lambda of: of["gate"].zero_(), lambda of: of["gate"].data.fill_(2.0), lambda of: None]
)
def test_a_batch_that_only_second_runs_read_may_be_written_to(change: Callable[[Any], object]) -> None:
    assert all(map(torch.equal, gradients(eager, change), gradients(planned, change)))


@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        (Gated, lambda of: of["weight"].data.mul_(0.9), "a parameter of shape"),
        (Gated, lambda of: of["bias"].data.mul_(0.9), "a parameter of shape"),
        (Gated, lambda of: of["bias"].detach().add_(1.0), "a tensor"),
        (Scaled, lambda of: of["gate"].data.fill_(2.0), "an input of shape"),
    ],
)
def test_other_changes_are_refused(kind: type[Gated], change: Callable[[Any], object], what: str) -> None:
    with pytest.raises(RerunError, match=f"{what}.*changed in place since; call backward before"):
        gradients(planned, change, kind)


def test_a_batch_that_asks_for_its_gradient_may_be_written_to_as_well() -> None:
    def leaf(module: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
        return program_of(module, (x, gate)).called((x, gate), {}, BatchCopies((x, gate)), checked=True)

    def change(of: Any) -> None:
        of["x"].data.fill_(2.0)

    assert all(map(torch.equal, gradients(eager, change), gradients(leaf, change)))
