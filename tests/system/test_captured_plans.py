"""Plans of captured stages: exact and to the byte, and what their guards refuse is exact, too."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import planner
from profiler.measurement import captured_stages
from profiler.recomputation.saved_tensors import RerunError
from tests.support.exactness import assert_same
from tests.support.nightly import by_day

WIDTH, LENGTH = 32, 16


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.norm, self.other_norm, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(rate)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*split.unbind(), is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.dropout(self.down(gelu(self.up(self.other_norm(x)))))


class Net(nn.Module):
    """Blocks, of which the second half reads what the first half made; lengths of batches may change."""

    def __init__(self, count: int = 6, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(count)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            half = len(self.blocks) // 2
            x = block(x + made[number - half] if self.skips and number >= half else x)
            made.append(x)
        return self.head(x)


def workload(skips: bool = False) -> planner.Workload:
    torch.manual_seed(0)
    return planner.Workload(Net(skips=skips), torch.randn(8, LENGTH, WIDTH), loss=lambda y: y.square().mean())


def trained(model: nn.Module, batches: list[Tensor], *, retain: bool = False) -> list[Tensor | None]:
    torch.manual_seed(1)
    found: list[Tensor | None] = []
    for batch in batches:
        model.zero_grad()
        loss = model(batch).square().mean()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters())]
    return [*found, torch.rand(3)]


def plans(profile: planner.Profile) -> Iterator[planner.Plan]:
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(profile, 1)
    least, most = refusal.value.minimum_budget_bytes, profile.unplanned_peak_bytes
    for share in (0.0, 0.25, 0.5, 0.8):
        yield planner.solve(profile, least + int((most - least) * share))


@pytest.fixture(scope="module")
def profile() -> planner.Profile:
    return planner.profile(workload())


@pytest.fixture(scope="module")
def plan(profile: planner.Profile) -> planner.Plan:
    """At a quarter of the way from the smallest budget to the unplanned peak."""
    return [*plans(profile)][1]


@pytest.mark.slow
@pytest.mark.parametrize("skips", by_day([False, True], [True]))
def test_every_plan_is_exact_and_takes_the_bytes_predicted(skips: bool) -> None:
    work = workload(skips)
    profile = planner.profile(work)
    assert not any(menu.opaque for menu in profile.menus) and any(len(menu.options) > 2 for menu in profile.menus)
    expected = trained(copy.deepcopy(work.model), [work.inputs] * 2)
    for plan in plans(profile):
        with planner.apply(work.model, plan):
            assert_same(trained(work.model, [work.inputs] * 2), expected)
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes
        assert planner.Plan.from_document(plan.to_document(), "here") == plan


@pytest.mark.slow
@pytest.mark.nightly
def test_programs_of_two_menus_with_one_graph_are_not_mixed_up() -> None:
    profile = planner.profile(workload(skips=True), stages=["Block"])
    once, *others = profile.menus[2].options
    mixed = replace(profile.menus[2], options=(once, *reversed(others)))
    profile = replace(profile, menus=(*profile.menus[:2], mixed, *profile.menus[3:]))
    for plan in plans(profile):
        work = workload(skips=True)
        with planner.apply(work.model, plan):
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes


@pytest.mark.slow
def test_stages_that_would_round_otherwise_are_planned_op_by_op_where_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounded_otherwise(*call: Any, rounded: bool = False) -> str:
        return "" if rounded else "output 0"

    monkeypatch.setattr(captured_stages, "difference", rounded_otherwise)
    profile = planner.profile(workload())
    assert all(menu.graph is None for menu in profile.menus)
    assert "gives other bits" in profile.menus[0].opaque and profile.menus[0].compiled is not None
    budget = "60%"
    exact, compiled = planner.solve(profile, budget), planner.solve(profile, budget, numerics="compiled")
    assert not exact.other_bits
    assert compiled.other_bits and compiled.predicted_seconds < exact.predicted_seconds
    work = workload()
    with planner.apply(work.model, planner.Plan.from_document(compiled.to_document(), "here")):
        assert planner.measure(work, repeats=1).peak_bytes == compiled.predicted_peak_bytes
    with pytest.raises(ValueError, match="numerics: expected one of eager, compiled, rounding, got 'float'"):
        planner.solve(profile, budget, numerics="float")  # type: ignore[arg-type]


def test_two_forwards_that_share_casts_are_refused_before_the_second_and_others_are_exact() -> None:
    torch.manual_seed(0)
    loss = lambda y: y.float().square().mean()  # noqa: E731
    blocks = (nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in range(4))
    work = planner.Workload(nn.Sequential(*blocks), torch.randn(128, WIDTH), loss=loss, autocast=torch.bfloat16)
    plan = planner.solve(planner.profile(work, stages=["0", "1", "2", "3"]), "90%")
    assert any(stage.option for stage in plan.stages)

    def gradients(*, together: bool) -> list[Tensor | None]:
        torch.manual_seed(1)
        work.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses = [loss(work.model(work.inputs))]
            losses += [loss(work.model(work.inputs))] if together else []
        with torch.autocast("cpu", torch.bfloat16):
            losses += [] if together else [loss(work.model(work.inputs))]
        sum(losses).backward()  # type: ignore[union-attr]
        return [parameter.grad for parameter in work.model.parameters()]

    expected = gradients(together=False)
    with planner.apply(work.model, plan):
        with pytest.raises(planner.errors.PlanMismatch, match="one call for each backward"):
            gradients(together=True)
        assert_same(gradients(together=False), expected)


def test_parameters_written_between_forward_and_backward_are_told_where_a_dropped_stage_runs_as_a_program(
    profile: planner.Profile,
) -> None:
    work = workload()
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(profile, 1)
    plan = planner.solve(profile, refusal.value.minimum_budget_bytes)
    assert any(stage.decision in ("recompute", "segment") for stage in plan.stages)
    with planner.apply(work.model, plan):
        loss = work.model(work.inputs).square().mean()
        for parameter in work.model.parameters():
            parameter.data.mul_(0.9)
        with pytest.raises(RerunError, match="changed in place since; call backward before"):
            loss.backward()


@pytest.mark.slow
def test_a_plan_is_carried_out_on_another_model_of_its_kind(plan: planner.Plan) -> None:
    work = workload()
    expected = trained(copy.deepcopy(work.model), [work.inputs] * 2)
    with planner.apply(work.model, plan):
        assert_same(trained(work.model, [work.inputs] * 2), expected)


@pytest.mark.slow
def test_batches_of_other_lengths_are_exact(plan: planner.Plan) -> None:
    work = workload()
    batches = [torch.randn(8, length, WIDTH) for length in (LENGTH, 12, 20, LENGTH, 12)]
    expected = trained(copy.deepcopy(work.model), batches)
    with planner.apply(work.model, plan), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(trained(work.model, batches), expected)


@pytest.mark.slow
def test_a_rate_that_is_changed_is_followed(plan: planner.Plan) -> None:
    work = workload()
    other = copy.deepcopy(work.model)
    with planner.apply(work.model, plan):
        for rate in (0.1, 0.3, 0.5):
            for model in (work.model, other):
                for block in model.blocks:  # type: ignore[union-attr]
                    block.dropout.p = rate
            assert_same(trained(work.model, [work.inputs]), trained(other, [work.inputs]))


@pytest.mark.slow
def test_a_graph_that_is_retained_goes_backward_twice(plan: planner.Plan) -> None:
    work = workload()
    expected = trained(copy.deepcopy(work.model), [work.inputs], retain=True)
    with planner.apply(work.model, plan), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(trained(work.model, [work.inputs], retain=True), expected)
