"""Stages that set their parameters in their first forward, by its data: that is the first step of the plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.plans.cost_model import chain_of
from profiler.recomputation.saved_tensors import RerunError
from profiler.workload.workload import Workload
from solvers.chain.baselines import droppable_runs, segmented_schedule
from tests.support.exactness import assert_same, choosing_inside, following, state_after
from tests.support.small_blocks import WIDTH, Stack

LARGE = 3 * 2**21  # numbers: more than is copied


class ActNorm(nn.Module):
    """Sets scale and shift so that its first output has mean 0 and deviation 1."""

    def __init__(self, numbers: int = WIDTH) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(numbers)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("ready", torch.tensor(False))
        self.ready: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale[:WIDTH].copy_(1 / x.std(0))
            self.ready.fill_(True)
        return (x + self.shift) * self.scale[:WIDTH]


class First(nn.Module):
    def __init__(self, numbers: int = WIDTH) -> None:
        super().__init__()
        self.norm = ActNorm(numbers)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class InTheMiddle(First):
    """What it saves before depends on what the parameter was, though the parameter itself is not saved."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.tanh(x + self.b.bias)
        if not self.norm.ready:
            with torch.no_grad():
                self.b.bias.add_(before.mean(0)).mul_(0.5)
        return x + self.b(torch.tanh(self.a(self.norm(before))))


def build(block: Callable[[], nn.Module]) -> Workload:
    torch.manual_seed(0)
    model = Stack([block() for _ in range(4)])
    for each in model.blocks:
        nn.init.normal_(each.b.bias, std=0.1)  # type: ignore[arg-type,union-attr]
    return Workload(
        model=model,
        inputs=torch.randn(8, WIDTH),
        loss=lambda output: output.square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


@functools.cache
def profiled(block: Callable[[], nn.Module], menus: bool = False) -> planner.Profile:
    return planner.profile(build(block), stages=["blocks.*", "head"], menus=menus)


def plan_of(way: str, block: Callable[[], nn.Module]) -> planner.Plan:
    profile = profiled(block, way == "selective")
    if way == "each":
        return planner.state(profile, planner.Rule(modules="blocks.*"))
    chain = chain_of(profile)
    return following(
        profile, choosing_inside(chain) if way == "selective" else segmented_schedule(droppable_runs(chain))
    )


@pytest.mark.parametrize("block", [First, InTheMiddle])
@pytest.mark.parametrize("way", ["each", "segment", "selective"])
def test_the_first_step_of_a_plan_leaves_what_it_leaves_without_one(way: str, block: Callable[[], nn.Module]) -> None:
    plain, ours = build(block), build(block)
    with planner.apply(ours.model, plan_of(way, block)):
        got, expected = state_after(ours, 3), state_after(plain, 3)
    assert all(map(math.isfinite, expected["losses"]))
    assert_same(got, expected)


def test_accumulated_steps_begin_where_the_first_one_ended() -> None:
    plain, ours = build(First), build(First)
    with planner.apply(ours.model, plan_of("segment", First)):
        for work in (plain, ours):
            losses = [work.model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(k))) for k in range(2)]
            for loss in losses:
                loss.square().mean().backward()
    assert_same(*({name: p.grad for name, p in work.model.named_parameters()} for work in (plain, ours)))


def test_what_sets_a_parameter_that_is_too_large_to_be_copied_is_told_what_to_do() -> None:
    block = functools.partial(First, LARGE)
    ours = build(block)
    told = r"'blocks.3': its forward sets the parameter 'norm.scale' of shape .*run one forward before planner.profile"
    with planner.apply(ours.model, plan_of("each", block)), pytest.raises(RerunError, match=told):
        ours.step()


def test_what_sets_its_parameters_again_in_a_later_step_is_told_what_to_do() -> None:
    ours = build(First)
    with planner.apply(ours.model, plan_of("each", First)):
        ours.step()
        ours.model.blocks[3].norm.ready.fill_(False)  # type: ignore[union-attr,index,operator]
        with pytest.raises(RerunError, match="stage 'blocks.3': its forward sets the parameter 'norm.scale'"):
            ours.step()


def test_a_stated_segment_ends_where_the_chain_has_no_link() -> None:
    work = build(First)
    profile = planner.profile(work, stages=["blocks.*", "head"], menus=False)
    plan = planner.state(profile, planner.Rules(checkpoints="head"))
    chain = chain_of(profile)
    cut = [k for k, record in enumerate(profile.stages) if record.links and not chain.stages[k].linked]
    assert cut and all(plan.stages[k].decision != "segment" for k in cut)
    with planner.apply(work.model, plan):
        assert planner.measure(work).peak_bytes == plan.predicted_peak_bytes
