"""The model's call as one stage: plans for models without blocks, or whose blocks read one another."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, interpolate, layer_norm

import planner
from planner.plans import profiling
from planner.zoo import build
from tests.support.exactness import assert_same, state_after
from tests.support.nightly import by_day

WIDTH, BATCH, SIDE = 32, 64, 16


class Functional(nn.Module):
    """Everything in one forward: there is no block to cut it at."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = dropout(gelu(layer_norm(x @ weight, (WIDTH,))), 0.1, self.training)
        return x


class Dense(nn.Module):
    """Each layer reads what all layers before it have made."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 * (k + 1), 4, 3, padding=1) for k in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            made.append(gelu(norm(layer(torch.cat(made, 1)))))
        return torch.cat(made, 1)


class UNet(nn.Module):
    """What the way down has made is read on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(4 * 2**k, 8 * 2**k, 3, stride=2, padding=1) for k in range(3))
        self.up = nn.ModuleList(nn.Conv2d(12 * 2**k, 4 * 2**k, 3, padding=1) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for layer in self.down:
            skips.append(x)
            x = gelu(layer(x))
        for layer in reversed(self.up):
            x = gelu(layer(torch.cat([interpolate(x, scale_factor=2.0), skips.pop()], 1)))
        return x


class Turned(nn.Module):
    """The gradient of a parameter has other strides than it: autograd copies it when backward has made all gradients.

    With that copy they are more than the leanest plan takes before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))
        self.turned = nn.Parameter(torch.randn(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for _ in range(30):
            x = gelu(x).sin()
        return x + self.turned.t().contiguous().sin().sum() / 1e4


def images() -> Tensor:
    return torch.randn(8, 4, SIDE, SIDE)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "functional": (Functional, lambda: torch.randn(8 * BATCH, WIDTH)),
    "dense": (Dense, images),
    "unet": (UNet, images),
    "turned": (Turned, lambda: torch.randn(BATCH, 256)),
}


def work_of(name: str) -> planner.Workload:
    torch.manual_seed(0)
    net, inputs = NETS[name]
    model = net()
    # AdamW's own step takes more than the largest gradient.
    optimizer = (torch.optim.SGD if name == "turned" else torch.optim.AdamW)(model.parameters(), lr=0.01)
    return planner.Workload(model=model, inputs=inputs(), loss=lambda y: y.square().mean(), optimizer=optimizer)


@functools.cache
def profile_of(name: str) -> planner.Profile:
    return planner.profile(work_of(name), stages="whole")


def budgets(profile: planner.Profile) -> list[int]:
    """Three between the smallest and the unplanned peak."""
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1)
    least, most = refused.value.minimum_budget_bytes, profile.unplanned_peak_bytes
    assert least < most
    return [least + (most - least) * share // 10 for share in (0, 4, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("name", by_day(NETS, ["unet"]))
def test_every_plan_is_exact_and_takes_the_bytes_predicted(name: str, tmp_path: Path) -> None:
    profile = profile_of(name)
    (stage,) = [stage for stage in profile.stages if stage.kind == "stage"]
    assert stage.name == "the model"
    assert profile.menus[0].graph is not None and not profile.menus[0].opaque
    expected = state_after(work_of(name), steps=3)
    smallest, *larger = budgets(profile)
    assert planner.solve(profile, smallest).recomputed_ops > 0
    for budget in (smallest, *larger):
        plan = planner.solve(profile, budget)
        plan.save(tmp_path / "plan.json")
        assert planner.Plan.load(tmp_path / "plan.json") == plan
        measured, trained = work_of(name), work_of(name)
        with planner.apply(measured.model, tmp_path / "plan.json"):
            assert planner.measure(measured, repeats=1).peak_bytes == plan.predicted_peak_bytes <= budget
        with planner.apply(trained.model, plan):
            assert_same(state_after(trained, steps=3), expected)


@pytest.mark.slow
def test_a_model_without_blocks_is_one_stage_without_being_asked_for() -> None:
    alone, whole = planner.profile(work_of("functional")), profile_of("functional")
    assert [stage.name for stage in alone.stages] == [stage.name for stage in whole.stages]
    budget = budgets(whole)[1]
    assert planner.solve(alone, budget).predicted_peak_bytes <= budget < whole.unplanned_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("faster", ["whole", "parts"])
@pytest.mark.nightly
def test_blocks_that_read_far_back_are_one_stage_where_its_plans_are_faster(
    faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowdown(profile: planner.Profile, budget_bytes: int) -> float:
        whole = sum(stage.kind == "stage" for stage in profile.stages) == 1
        return 1.1 if whole == (faster == "whole") else 1.2

    monkeypatch.setattr(profiling, "_slowdown", slowdown)
    profile = planner.profile(build("unet", image=64, hidden=8, batch=8))
    names = [stage.name for stage in profile.stages if stage.kind == "stage"]
    assert (names == ["the model"]) == (faster == "whole")


@pytest.mark.slow
def test_what_does_not_train_is_as_without_a_plan_and_a_plan_comes_off() -> None:
    work, profile = work_of("dense"), profile_of("dense")
    other = copy.deepcopy(work.model)
    handle = planner.apply(work.model, planner.solve(profile, budgets(profile)[0]))
    assert planner.handle_of(work.model) is handle
    assert torch.equal(work.model.eval()(work.inputs), other.eval()(work.inputs))
    with torch.no_grad():
        assert torch.equal(work.model.train()(work.inputs), other.train()(work.inputs))
    handle.remove()
    assert planner.handle_of(work.model) is None
    assert all("forward" not in vars(module) for module in work.model.modules())
    assert planner.measure(work, repeats=1).peak_bytes == profile.unplanned_peak_bytes


def test_another_model_is_refused() -> None:
    plan = planner.solve(profile_of("dense"), "100%")
    with pytest.raises(planner.errors.PlanMismatch):
        planner.apply(work_of("unet").model, plan)


class Branching(nn.Module):
    """What runs depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.tanh() if y.sum() > 0 else y


class Counting(nn.Module):
    """Sets an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x).tanh()


@pytest.mark.parametrize(("net", "why"), [(Branching, "traced as one graph"), (Counting, "sets attributes")])
def test_what_cannot_be_captured_is_said_in_the_menu(net: Callable[[], nn.Module], why: str) -> None:
    def work() -> planner.Workload:
        torch.manual_seed(0)
        return planner.Workload(model=net(), inputs=torch.randn(BATCH, WIDTH), loss=lambda y: y.square().mean())

    profile = planner.profile(work(), stages="whole")
    assert profile.menus[0].graph is None and why in profile.menus[0].opaque
    planned: Any = work()
    with planner.apply(planned.model, planner.solve(profile, "100%")):
        assert_same(state_after(planned), state_after(work()))
