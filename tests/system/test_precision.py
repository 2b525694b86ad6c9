"""Mixed precision: loss scaling, skipped steps and clipping under a plan; a plan holds for its own precision."""

from __future__ import annotations

import warnings
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner.explain import measured_step
from planner.training import training
from profiler.workload.steps import resident_bytes_of
from tests.support.exactness import assert_same, budgets, state_after
from tests.support.master_weights import in_half, with_masters
from tests.support.odd_models import workload

HUGE = 2.0**20  # a scale at which float16 gradients of these models overflow: for three steps, as it is halved


STEPS = 6


def scaled(name: str, *, init_scale: float = 256.0, clip_norm: float | None = None) -> planner.Workload:
    """A model of the list under float16 autocast, with a scaler."""
    plain = workload(name, autocast=torch.float16)
    return planner.Workload(
        model=plain.model,
        inputs=plain.inputs,
        loss=plain.loss,
        optimizer=plain.optimizer,
        autocast=torch.float16,
        scaler=torch.amp.GradScaler("cpu", init_scale=init_scale),
        clip_norm=clip_norm,
    )


def half(name: str) -> planner.Workload:
    """A model of the list with bfloat16 weights."""
    work = workload(name)
    return planner.Workload(
        model=work.model.bfloat16(), inputs=in_half(work.inputs), loss=work.loss, optimizer=work.optimizer
    )


def scale_after(work: planner.Workload, steps: int) -> dict[str, Any]:
    assert work.scaler is not None
    return {**state_after(work, steps), "scale": work.scaler.state_dict()}


def test_a_step_without_finite_gradients_changes_nothing_but_the_scale() -> None:
    work = scaled("dropout", init_scale=HUGE)
    before = [p.detach().clone() for p in work.model.parameters()]
    work.step()
    assert not work.stepped and work.scaler is not None
    assert work.scaler.get_scale() == HUGE / 2
    assert all(torch.equal(a, b) for a, b in zip(before, work.model.parameters(), strict=True))
    assert work.optimizer is not None and not work.optimizer.state


def test_scaling_by_a_power_of_two_changes_no_update() -> None:
    """float32 throughout: scaled and unscaled again, every gradient is what it was."""
    plain, with_scaler = workload("plain"), workload("plain")
    with_scaler.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert_same(state_after(with_scaler), state_after(plain))


def test_gradients_are_clipped_unscaled() -> None:
    work = scaled("plain", init_scale=1024.0, clip_norm=1e-3)
    work.step()
    assert work.stepped
    norm = torch.stack([p.grad.norm() for p in work.model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)  # clip_grad_norm_ divides by the norm plus 1e-6


def test_clipping_needs_no_scaler() -> None:
    plain = workload("plain")
    work = planner.Workload(
        model=plain.model, inputs=plain.inputs, loss=plain.loss, optimizer=plain.optimizer, clip_norm=1e-3
    )
    work.step()
    norm = torch.stack([p.grad.norm() for p in work.model.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_planned_steps_are_exact_with_a_scaler_skipped_steps_included(clip_norm: float | None) -> None:
    def build() -> planner.Workload:
        return scaled("dropout", init_scale=HUGE, clip_norm=clip_norm)

    seen: list[bool] = []
    work = build()
    for _ in range(STEPS):
        work.step()
        seen.append(work.stepped)
    assert not seen[0] and seen[-1]
    expected = scale_after(build(), STEPS)
    profile = planner.profile(build(), menus=clip_norm is None)
    for budget in islice(budgets(profile), 2):
        plan = planner.solve(profile, budget, solver="rotor")
        planned = build()
        with planner.apply(planned.model, plan):
            assert_same(scale_after(planned, STEPS), expected)
            measured = planner.measure(planned, repeats=1)
        assert measured.peak_bytes <= plan.predicted_peak_bytes <= budget


@pytest.mark.parametrize("name", ["dropout", "batchnorm"])
def test_planned_steps_are_exact_in_bfloat16(name: str) -> None:
    expected = state_after(half(name))
    profile = planner.profile(half(name), menus=name == "dropout")
    assert profile.precision == "bfloat16"
    for budget in islice(budgets(profile), 2):
        plan = planner.solve(profile, budget, solver="rotor")
        work = half(name)
        with planner.apply(work.model, plan):
            assert_same(state_after(work), expected)
            measured = planner.measure(work, repeats=1)
        assert measured.peak_bytes <= plan.predicted_peak_bytes <= budget


def test_profiling_measures_a_step_in_which_the_optimizer_steps() -> None:
    small, huge = (planner.profile(scaled("plain", init_scale=scale), menus=False) for scale in (256.0, HUGE))
    assert huge.unplanned_peak_bytes == small.unplanned_peak_bytes
    assert huge.optimizer.peak_bytes == small.optimizer.peak_bytes
    assert huge.resident == small.resident and huge.resident.scaler == 4 + 4  # the scale, and the steps since


def test_profiling_and_measuring_leave_the_scaler_as_it_was() -> None:
    fresh, used = scaled("plain", init_scale=HUGE), scaled("plain", init_scale=HUGE)
    used.step()
    assert used.scaler is not None and fresh.scaler is not None
    before = used.scaler.state_dict()
    for work in (fresh, used):
        planner.profile(work, menus=False)
        planner.measure(work, repeats=1)
    assert used.scaler.state_dict() == before
    assert resident_bytes_of(fresh).scaler == 0


def test_gradients_that_are_never_finite_are_reported() -> None:
    work = scaled("plain")
    work.loss = lambda output: output.float().sum() * float("inf")
    with pytest.raises(planner.errors.ProfileError, match="finite gradients.*bfloat16"):
        planner.profile(work)


def test_master_weights_are_resident_and_planned_peaks_count_them() -> None:
    profile = planner.profile(with_masters(), menus=False)
    count = sum(p.numel() for p in with_masters().model.parameters())
    assert profile.resident.parameters == 2 * count
    assert profile.resident.other_parameters == 4 * count
    assert profile.stages[0].forward.start_bytes == profile.resident.total
    work = with_masters()
    plan = planner.solve(profile, next(budgets(profile)), solver="rotor")
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes


class OwnScale(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1000))

    def forward(self, output: Tensor) -> Tensor:
        return (output.float() ** 2).mean() * self.scale.mean()


def test_parameters_of_the_loss_are_resident_once() -> None:
    plain, loss = workload("plain"), OwnScale()
    both = [*plain.model.parameters(), *loss.parameters()]
    work = planner.Workload(model=plain.model, inputs=plain.inputs, loss=loss, optimizer=torch.optim.SGD(both, lr=0.1))
    assert resident_bytes_of(work).other_parameters == 4000


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"scaler": 3}, "GradScaler"),
        ({"clip_norm": 0}, "clip_norm"),
        ({"clip_norm": "1"}, "clip_norm"),
        ({"optimizer": None, "clip_norm": 1.0}, "optimizer"),
        ({"optimizer": None, "scaler": torch.amp.GradScaler("cpu")}, "optimizer"),
    ],
)
def test_what_a_workload_refuses(settings: dict[str, Any], match: str) -> None:
    plain = workload("plain")
    with pytest.raises(ValueError, match=match):
        planner.Workload(**{"model": plain.model, "inputs": plain.inputs, "optimizer": plain.optimizer, **settings})


def in_precision(kind: str) -> planner.Workload:
    if kind == "bfloat16":
        return half("plain")
    return workload("plain", autocast=None if kind == "float32" else getattr(torch, kind.split()[-1]))


KINDS = ("float32", "float32, autocast bfloat16", "float32, autocast float16", "bfloat16")


@pytest.fixture(scope="module")
def plans() -> dict[str, planner.Plan]:
    profiles = {kind: planner.profile(in_precision(kind), menus=False) for kind in KINDS}
    assert {kind: profile.precision for kind, profile in profiles.items()} == {kind: kind for kind in KINDS}
    return {kind: planner.solve(profile, next(budgets(profile))) for kind, profile in profiles.items()}


@pytest.mark.parametrize("made_in", KINDS)
@pytest.mark.parametrize("used_in", KINDS)
def test_a_plan_of_one_precision_is_refused_in_another(plans: Any, made_in: str, used_in: str) -> None:
    plan, work = plans[made_in], in_precision(used_in)
    if made_in == used_in:
        assert training.train_planned(work, plan, steps=1).plan is plan
        return
    for use in (lambda: training.train_planned(work, plan, steps=1), lambda: measured_step.view_step(work, plan)):
        with pytest.raises(planner.errors.PlanMismatch, match=f"in {used_in}, and the plan is for {made_in};"):
            use()
    shown = used_in if made_in.startswith("float32") == used_in.startswith("float32") else used_in.partition(",")[0]
    with pytest.raises(planner.errors.PlanMismatch, match=f"in {shown}, and the plan"), planner.apply(work.model, plan):
        work.step()
    assert planner.handle_of(work.model) is None


@pytest.mark.parametrize("budget", ["smallest", "100%"])
@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16])
def test_parameters_converted_after_apply_are_refused_by_the_next_step(plans: Any, budget: str, convert: Any) -> None:
    work, plan = in_precision("float32"), plans["float32"]
    if budget != "smallest":
        plan = planner.solve(planner.profile(work, menus=False), budget)
    with planner.apply(work.model, plan):
        work.step()
        convert(work.model)
        assert isinstance(work.inputs, Tensor)
        work.inputs = work.inputs.to(next(work.model.parameters()).dtype)
        with pytest.raises(
            planner.errors.PlanMismatch, match="the step runs in .*, and the plan is for float32; run it as it was"
        ):
            work.step()
        work.model.float()
        work.inputs = work.inputs.float()
        work.step()


def test_evaluating_in_another_precision_is_no_business_of_the_plan(plans: Any) -> None:
    work = in_precision("float32")
    with planner.apply(work.model, plans["float32"]), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        work.model(work.inputs)


class Warps(nn.Module):
    """Moves what it sees by an affine grid, whose kernel casts within itself under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.mix = nn.Conv2d(8, 2, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        still = F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3), list(x.shape), align_corners=False)
        grid = still + 0.1 * torch.tanh(self.offsets(x)).permute(0, 2, 3, 1)
        return x + F.leaky_relu(self.mix(F.grid_sample(x, grid, align_corners=False)), 0.1)


class Multiplies(nn.Module):
    """The same of ``nn.Bilinear``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.both = nn.Linear(32, 32), nn.Bilinear(32, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.both(x, torch.sigmoid(self.up(x)).float()))


@pytest.mark.parametrize(("kind", "shape"), [(Warps, (4, 8, 24, 24)), (Multiplies, (64, 32))])
def test_ops_that_cast_within_their_kernels_are_exact_under_autocast(kind: Any, shape: tuple[int, ...]) -> None:
    def made() -> planner.Workload:
        torch.manual_seed(0)
        model, x = nn.Sequential(*(kind() for _ in range(4))), torch.randn(shape)
        loss, optimizer = (lambda y: y.float().square().mean()), torch.optim.SGD(model.parameters(), 0.1)
        return planner.Workload(model=model, inputs=x, loss=loss, optimizer=optimizer, autocast=torch.bfloat16)

    expected, profile = state_after(made()), planner.profile(made())
    assert not any(menu.options for menu in profile.menus)
    assert all(stage.recomputable for stage in profile.stages if stage.kind == "stage")
    for budget_bytes in budgets(profile):
        plan, work = planner.solve(profile, budget_bytes), made()
        with warnings.catch_warnings(), planner.apply(work.model, plan):
            warnings.simplefilter("error")
            assert_same(state_after(work), expected)
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes


class Layers(nn.Module):
    """Layers of which the casts of weights weigh about as much as activations; ``one``: the same layer each time."""

    def __init__(self, one: bool) -> None:
        super().__init__()
        made = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(1 if one else 4)]
        self.layers, self.times = nn.ModuleList(made), 4 if one else 1

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers] * self.times:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("one", [False, True])
def test_casts_of_parameters_are_counted_while_autocast_holds_them(one: bool) -> None:
    torch.manual_seed(0)
    model = Layers(one)
    work = planner.Workload(
        model=model,
        inputs=torch.randn(48, 64, requires_grad=True),
        loss=lambda output: output.float().square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        autocast=torch.bfloat16,
    )
    profile = planner.profile(work, stages=["layers.*"], menus=False)
    casts = [record for record in profile.shared if record.cast]
    assert sum(record.size_bytes for record in casts) == 2 * sum(p.numel() for p in model.parameters())
    assert any(record.recast_in for record in casts) == one
    for budget in budgets(profile):
        plan = planner.solve(profile, budget)
        with planner.apply(model, plan):
            measured = planner.measure(work, repeats=1).peak_bytes
        assert measured <= plan.predicted_peak_bytes
        assert one or measured == plan.predicted_peak_bytes
