"""Checkpointing of torch's around planned stages, or inside them, that is switched on after profiling."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import planner
from planner.plans.cost_model import chain_of
from profiler.workload.workload import Workload
from tests.support.exactness import assert_same, budgets, choosing_inside, following, state_after
from tests.support.offload_plans import halves, planned
from tests.support.small_blocks import WIDTH, Residual, Stack


class Checkpointed(Stack):
    """Its blocks' calls lie in checkpoints where ``around`` says which."""

    around: dict[str, Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:

            def call(given: Tensor, block: nn.Module = block) -> Tensor:
                return torch.tanh(block(given))

            x = call(x) if self.around is None else checkpoint(call, x, **self.around)
        return self.head(x)


class Inside(Residual):
    """The same of what is inside of a block."""

    around: dict[str, Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.around is None:
            return super().forward(x)
        return x + torch.tanh(checkpoint(self.dropout, checkpoint(self.inner, x, **self.around), **self.around))


def build(block: type[Residual] = Residual) -> Workload:
    torch.manual_seed(0)
    model = Checkpointed([block(dropout=0.1) for _ in range(4)])
    return Workload(
        model=model,
        inputs=torch.randn(8, WIDTH, requires_grad=True),  # Without, a reentrant checkpoint has no gradient.
        loss=lambda output: output.square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


@functools.cache
def profiled(block: type[Residual] = Residual) -> planner.Profile:
    return planner.profile(build(block), stages=["blocks.*", "head"])


def plan_of(way: str, block: type[Residual] = Residual) -> planner.Plan:
    profile = profiled(block)
    if way == "selective":
        return following(profile, choosing_inside(chain_of(profile)))
    if way == "segment":
        return planner.state(profile, planner.Rules(checkpoints="head"))
    if way == "sent":
        return planned(profile, halves)
    return planner.state(profile, planner.Rule(modules="blocks.*"))


@pytest.fixture(params=[True, False], ids=["reentrant", "not reentrant"])
def around(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"use_reentrant": request.param}


WAYS = pytest.mark.parametrize("way", ["each", "segment", "selective", "sent"])


@WAYS
def test_a_checkpoint_around_stages_leaves_what_it_leaves_without_a_plan(way: str, around: dict[str, Any]) -> None:
    plain, ours = build(), build()
    with planner.apply(ours.model, plan_of(way)):
        for work in (plain, ours):
            work.model.around = around  # type: ignore[assignment]
        assert_same(state_after(ours), state_after(plain))


@WAYS
def test_so_does_one_that_only_some_steps_and_some_blocks_have(way: str) -> None:
    plain, ours = build(), build()
    with planner.apply(ours.model, plan_of(way)):
        for work in (plain, ours):
            block: Any = work.model.blocks[1]  # type: ignore[index]
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        assert_same(state_after(ours, 1), state_after(plain, 1))
        for work in (plain, ours):
            del work.model.blocks[1].forward  # type: ignore[union-attr,index]
    assert_same(state_after(ours, 1), state_after(plain, 1))


@WAYS
def test_so_do_checkpoints_inside_stages(way: str, around: dict[str, Any]) -> None:
    plain, ours = build(Inside), build(Inside)
    with planner.apply(ours.model, plan_of(way, Inside)):
        for work in (plain, ours):
            for block in work.model.blocks:  # type: ignore[union-attr]
                block.around = around
        assert_same(state_after(ours), state_after(plain))


@WAYS
def test_so_does_one_around_the_model(way: str, around: dict[str, Any]) -> None:
    plain, ours = build(), build()
    gradients = []
    with planner.apply(ours.model, plan_of(way)):
        for work in (plain, ours):
            torch.manual_seed(3)
            inputs = torch.randn(8, WIDTH, requires_grad=True)
            checkpoint(work.model, inputs, **around).square().mean().backward()
            gradients.append([inputs.grad, *(p.grad for p in work.model.parameters())])
    assert_same(*gradients)


def test_that_the_plan_does_not_act_there_is_said_once() -> None:
    ours = build()
    with planner.apply(ours.model, plan_of("each")), pytest.warns(RuntimeWarning) as caught:
        ours.model.around = {"use_reentrant": False}  # type: ignore[assignment]
        state_after(ours)
    said = [str(warning.message) for warning in caught if "blocks.1" in str(warning.message)]
    assert len(said) == 1
    assert "torch.utils.checkpoint around it recomputes it; the plan does not act in it" in said[0]


def test_checkpointing_of_transformers_that_is_switched_on_after_apply(around: dict[str, Any]) -> None:
    works = []
    for _ in range(2):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 4, "vocab_size": 64, "num_hidden_layers": 3}
        config = transformers.LlamaConfig(use_cache=False, **sizes)
        model = transformers.LlamaForCausalLM(config).train()
        ids = torch.randint(0, 64, (4, 16))
        works.append(Workload(model=model, inputs={"input_ids": ids, "labels": ids}, loss=lambda out: out.loss))
    plain, ours = works
    profile = planner.profile(ours, stages=["model.layers.*.mlp", "model.layers.*.self_attn"])
    plan = planner.solve(profile, next(budgets(profile)))
    with planner.apply(ours.model, plan):
        for work in works:
            work.model.gradient_checkpointing_enable(around)  # type: ignore[operator]
            work.model.enable_input_require_grads()  # type: ignore[operator]
        assert_same(state_after(ours), state_after(plain))
