"""A step that keeps more than the profiled one is within its budget, or says that it may not be."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.plans.cost_model import chain_of
from profiler.workload.workload import Workload
from tests.support.exactness import choosing_inside, following
from tests.support.small_blocks import WIDTH, Residual, Stack


def workload(blocks: list[nn.Module], **settings: Any) -> Workload:
    torch.manual_seed(0)
    model = Stack(blocks)
    return Workload(
        model=model,
        inputs=(torch.randn(64, WIDTH),),
        loss=lambda output: output.pow(2).mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        **settings,
    )


def smallest_plan(work: Workload) -> planner.Plan:
    profile = planner.profile(work)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1)
    return planner.solve(profile, caught.value.minimum_budget_bytes)


def said_in(work: Workload, steps: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            work.step()
    return [str(warning.message) for warning in said]


@pytest.mark.nightly
def test_a_rate_that_was_nothing_when_profiled_is_said_once() -> None:
    work = workload([Residual() for _ in range(6)])
    with planner.apply(work.model, smallest_plan(work)):
        assert said_in(work) == []
        for module in work.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        said = said_in(work)
    larger = [each for each in said if "more differentiable ops" in each]
    assert said and len(larger) <= 1 and all("the peak is not promised" in each for each in larger)
    others = [each for each in said if each not in larger]
    assert all("its modules hold something else" in each and "is recomputed as a whole" in each for each in others)


class Alternating(nn.Module):
    """Does more in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        self.odd = not self.odd
        y = torch.sigmoid(self.first(x))
        return x + self.last(torch.tanh(y * 3) if self.odd else y)


def test_stages_that_differ_from_step_to_step_are_named() -> None:
    profile = planner.profile(workload([Alternating() for _ in range(4)]), menus=False)
    assert any("'blocks.0' and 3 more: what is saved differs from one step" in line for line in profile.unsteady)


def test_a_model_that_differs_from_step_to_step_outside_of_its_stages_is_named() -> None:
    profile = planner.profile(workload([Alternating() for _ in range(4)]), stages=["head"], menus=False)
    assert any("the model: what is saved differs from one step" in line for line in profile.unsteady)


def test_a_frozen_part_that_is_trained_now_is_said_once() -> None:
    work = workload([Residual() for _ in range(6)])
    work.model.get_submodule("blocks.3").requires_grad_(False)
    with planner.apply(work.model, smallest_plan(work)):
        assert said_in(work) == []
        work.model.get_submodule("blocks.3").requires_grad_(True)
        said = said_in(work)
    assert sum("(a frozen one that is trained now); the peak is not promised" in line for line in said) == 1


@pytest.mark.nightly
def test_of_two_frozen_parts_the_one_that_is_trained_later_gets_its_gradient() -> None:
    work, other = (workload([Residual() for _ in range(6)]) for _ in range(2))
    for each in (work, other):
        for name in ("blocks.2", "blocks.3"):
            each.model.get_submodule(name).requires_grad_(False)
    plan = smallest_plan(work)
    other.model.load_state_dict(work.model.state_dict())
    with planner.apply(work.model, plan):
        for each in (work, other):
            each.model.get_submodule("blocks.3").requires_grad_(True)
            each.zero_grad()
            said_in(each, steps=1)
    for one, theirs in zip(work.model.parameters(), other.model.parameters(), strict=True):
        assert (one.grad is None) == (theirs.grad is None)
        assert one.grad is None or theirs.grad is None or torch.equal(one.grad, theirs.grad)


@pytest.mark.nightly
def test_a_part_that_is_frozen_is_said_where_its_casts_were_shared() -> None:
    plain, cast = (workload([Residual() for _ in range(6)], autocast=autocast) for autocast in (None, "bfloat16"))
    for work, expected in ((plain, 0), (cast, 1)):
        with planner.apply(work.model, smallest_plan(work)):
            work.model.get_submodule("blocks.3").requires_grad_(False)
            said = said_in(work)
        assert ["whose casts autocast makes anew" in line for line in said] == expected * [True]


@pytest.mark.nightly
def test_a_rate_that_was_zero_is_said_where_a_frozen_part_takes_as_many_ops_away() -> None:
    work = workload([Residual() for _ in range(6)])
    with planner.apply(work.model, smallest_plan(work)):
        work.model.get_submodule("blocks.3").requires_grad_(False)
        assert said_in(work) == []
        for module in work.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        said = said_in(work)
    assert any("one that is frozen now, and a rate that was 0 and is not now" in line for line in said)


class Skipping(nn.Module):
    """Three blocks, the middle one of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.skips = nn.ModuleList(Residual() for _ in range(3)), False

    def forward(self, x: Tensor) -> Tensor:
        for number, inner in enumerate(self.inner):
            if number != 1 or not self.skips:
                x = inner(x)
        return x


def test_ops_that_are_taken_for_those_that_were_left_out_are_said() -> None:
    work = workload([Skipping() for _ in range(4)])
    profile = planner.profile(work, stages=["blocks.*"])
    with planner.apply(work.model, following(profile, choosing_inside(chain_of(profile)))):
        assert said_in(work) == []
        skipping = [part for part in work.model.modules() if isinstance(part, Skipping)]
        skipping[2].skips = True
        (said,) = said_in(work)
    assert "'blocks.2': it does not run as the program that was planned" in said and "recomputed as a whole" in said


class Dividing(nn.Module):
    """Divides its batch by values, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = (x[:, 0] > 0).long()
        sizes = torch.stack([first.sum(), (1 - first).sum()]).tolist()
        return torch.cat([expert(part) for expert, part in zip(self.experts, x.split(sizes), strict=True)])


def test_sizes_that_python_reads_are_said() -> None:
    profile = planner.profile(workload([Dividing() for _ in range(3)]), stages=["head"], menus=False)
    assert profile.unsteady == ("tolist in 'blocks.1' and 1 other module: its bytes depend on values",)
    assert profile.batch_sized == ("tolist in 'blocks.0': its bytes depend on values",)


class Storing(nn.Module):
    """Keeps a tensor from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.detach() * 2]
        return self.inner(x)


def test_what_modules_keep_from_step_to_step_counts() -> None:
    work = workload([Storing() for _ in range(6)])
    resident = planner.profile(work, menus=False).resident
    assert resident.buffers == 6 * 64 * WIDTH * 4
