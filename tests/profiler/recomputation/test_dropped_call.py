"""Calls that run again in backward without a plan: exact, and holding what the call itself would of others'."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from profiler.recomputation.dropped_call import DroppedCall


def run_dropped(module: nn.Module, hidden: Tensor, held: tuple[int, ...] = ()) -> Tensor:
    call = DroppedCall(module, module, held=held)
    call.hold_input(((hidden,), {}), on_device=())
    return call.run_first((hidden,), {})


def gradients(module: nn.Module, x: Tensor, *, drop: bool) -> list[Tensor]:
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    hidden = x * 2
    output = run_dropped(module, hidden) if drop else module(hidden)
    output.square().sum().backward()
    found = [x.grad, *(p.grad for p in module.parameters()), *(b.clone() for b in module.buffers())]
    for parameter in module.parameters():
        parameter.grad = None
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Tanh()], ids=lambda layer: type(layer).__name__
)
def test_gradients_buffers_and_random_numbers_are_those_of_the_call(layer: nn.Module) -> None:
    torch.manual_seed(1)
    module, x = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8)), torch.randn(16, 8)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    expected = gradients(module, x, drop=False)
    module.load_state_dict(state)
    assert all(map(torch.equal, gradients(module, x, drop=True), expected))


class Saving(nn.Module):
    """Saves its result, not its input; tells which storages it made."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + 1)


def test_it_holds_no_input_that_the_call_does_not_save_and_nothing_of_its_own() -> None:
    module, x = nn.Sequential(Saving(), Saving()), torch.randn(1000, requires_grad=True)
    hidden = x * 1
    storages = [weakref.ref(hidden.untyped_storage())]
    output = run_dropped(module, hidden)
    del hidden
    assert storages[0]() is None
    output.sum().backward()
    assert x.grad is not None


def test_what_is_to_stay_is_held() -> None:
    made: list[weakref.ref[object]] = []
    module, x = Saving(), torch.randn(1000, requires_grad=True)
    for held, alive in (((), False), ((0,), True)):
        output = run_dropped(module, x * 1, held)
        made.append(weakref.ref(output.untyped_storage()))
        loss = output.sum()
        del output
        assert (made[-1]() is not None) == alive
        loss.backward()
