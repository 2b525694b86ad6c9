"""What a loop changes between forward and backward changes no gradient, or is refused in words."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import planner
from tests.support.exactness import assert_same
from tests.support.habits import (
    SETTINGS,
    WIDTH,
    Habit,
    Net,
    blocks_of,
    evaluating,
    loss_of,
    net,
    plain,
    recomputing,
    trained,
)


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    return recomputing(net())


def other_rate(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    for block in blocks_of(model):
        block.dropout.p = 0.9
    loss.backward()
    for block in blocks_of(model):
        block.dropout.p = 0.1
    return loss


def conditioned(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x, torch.full((32, 1), 0.5)))
    with torch.no_grad():
        model(x, torch.full((32, 1), 3.0))
    loss.backward()
    return loss


def conditioned_twice(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x, torch.full((32, 1), 0.5))) + loss_of(model(x, torch.full((32, 1), 2.0)))
    loss.backward()
    return loss


def other_attributes(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    for block in blocks_of(model):
        block.scale, block.context.time = 3.0, 2.0
        block.history.append(5.0)
    loss.backward()
    for block in blocks_of(model):
        block.scale, block.context.time = 1.0, 1.0
        block.history.pop()
    return loss


def other_buffers(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    before = [block.codebook for block in blocks_of(model)]
    for block in blocks_of(model):
        block.codebook = torch.full_like(block.codebook, 2.0)
        block.mean.fill_(3.0)
    loss.backward()
    for block, buffer in zip(blocks_of(model), before, strict=True):
        block.codebook = buffer
    return loss


def written_buffers(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    for block in blocks_of(model):
        block.codebook.mul_(0.5)
    loss.backward()
    return loss


def other_data(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    before = [block.first.weight.data for block in blocks_of(model)]
    for block in blocks_of(model):
        block.first.weight.data = torch.zeros_like(block.first.weight)
    loss.backward()
    for block, data in zip(blocks_of(model), before, strict=True):
        block.first.weight.data = data
    return loss


def other_flags(model: nn.Module, x: Tensor) -> Tensor:
    threads = torch.get_num_threads()
    loss = loss_of(model(x))
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(threads + 1)
    try:
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(threads)
    return loss


def frozen_between(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    for block in blocks_of(model):
        block.first.weight.requires_grad_(False)
    loss.backward()
    for block in blocks_of(model):
        block.first.weight.requires_grad_(True)
    return loss


def zeroed_batch(model: nn.Module, x: Tensor) -> Tensor:
    given = x.clone()
    loss = loss_of(model(given))
    given.zero_()
    loss.backward()
    return loss


def functional(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(functional_call(model, {n: 1.1 * p for n, p in model.named_parameters()}, (x,)))
    loss.backward()
    return loss


def meta_learning(model: nn.Module, x: Tensor) -> Tensor:
    weights: dict[str, Tensor] = dict(model.named_parameters())
    inner = loss_of(functional_call(model, weights, (x,)))
    gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {name: p - 0.001 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
    loss = loss_of(functional_call(model, fast, (x,)))
    loss.backward()
    return loss


def seeded_between(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    torch.manual_seed(3)
    loss.backward()
    return loss


HABITS: list[Habit] = [
    *(plain, evaluating, other_rate, conditioned, conditioned_twice, other_attributes, other_buffers, written_buffers),
    *(other_data, other_flags, frozen_between, zeroed_batch, functional, meta_learning, seeded_between),
]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_what_changes_between_forward_and_backward_changes_no_gradient(plan: planner.Plan, habit: Habit) -> None:
    expected = trained(net(), habit)
    model = net()
    with warnings.catch_warnings(), planner.apply(model, plan):
        warnings.simplefilter("error")
        # The profiled step had no condition.
        warnings.filterwarnings("ignore", "planner.apply: the forward has")
        warnings.filterwarnings("ignore", "planner.apply: retain_graph=True or create_graph=True")
        assert_same(trained(model, habit), expected)


def written_data(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    for block in blocks_of(model):
        block.first.weight.data.mul_(1.5)
    loss.backward()
    return loss


def other_global(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    SETTINGS["factor"] = 2.0
    try:
        loss.backward()
    finally:
        SETTINGS["factor"] = 1.0
    return loss


def stepped(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    with torch.no_grad():
        for block in blocks_of(model):
            block.first.bias.mul_(1.5)  # Autograd saves no bias: without a plan this is legal.
    loss.backward()
    return loss


def replaced_between_orders(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    loss = loss + torch.stack([slope.pow(2).sum() for slope in slopes]).sum()
    for block in blocks_of(model):
        block.norm.weight.data = block.norm.weight.data * 1.5
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        (written_data, r"stage 'blocks\.\d'.*other values.*written through \.data.*keep this stage"),
        (other_global, r"stage 'blocks\.\d'.*other values.*a global.*keep this stage"),
        (stepped, r"stage 'blocks\.\d'.*'bias', a parameter.*changed in place.*call backward before"),
        (
            replaced_between_orders,
            r"\.data of a parameter was replaced after .*create_graph=True; .*the last backward",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_put_back_is_refused_before_a_gradient_is_wrong(
    plan: planner.Plan, habit: Habit, words: str
) -> None:
    model = net()
    with planner.apply(model, plan), pytest.raises(RuntimeError, match=words):
        trained(model, habit)
    assert_same(trained(net(), plain), trained(net(), plain))


def test_a_norm_that_is_added_after_apply_is_updated_once(plan: planner.Plan) -> None:
    def with_norms(model: Net) -> Net:
        for block in blocks_of(model):
            block.last = nn.Sequential(block.last, nn.BatchNorm1d(WIDTH))
        return model

    expected = trained(with_norms(net()), plain)
    model = net()
    with planner.apply(model, plan):
        assert_same(trained(with_norms(model), plain), expected)
