"""Second runs of kernels of all kinds, after contexts around the first have ended, and under transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

import planner
from profiler.workload.workload import Workload
from tests.support.exactness import assert_same
from tests.support.habits import WIDTH, Habit, Net, Plain, batch, evaluating, loss_of, net, plain, recomputing, trained
from tests.support.nightly import by_day
from tests.support.offload_plans import SCHEDULES, planned


class Norms(nn.Module):
    """Train-mode kernels, which read statistics that kernels in evaluation mode do not save."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(1, 32, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + y.transpose(1, 2).reshape(32, WIDTH)


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(torch.tanh(self.inner(x)))


class Recurrent(nn.Module):
    """Its kernel saves memory of which it has filled a part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.unsqueeze(1))[0].squeeze(1)


class Doubled(torch.autograd.Function):
    """Saves memory that it does not fill, as some kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(300 * x.numel()))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return 2 * gradients[0]


class Unfilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(Doubled.apply(self.first(x)))  # pyright: ignore[reportArgumentType]


class Noisy(nn.Module):
    """RReLU saves its noise before it draws it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(nn.functional.rrelu(self.first(x), training=True))


class Gated(nn.Module):
    """Its gates lie in one storage, and are saved and written to one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.cell = nn.GRU(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows(x.reshape(4, 8, WIDTH))[0].reshape(32, WIDTH) + self.cell(x)[0]


class Tangents(nn.Module):
    """Calls a module on tensors that ``torch.func`` wraps, which have no storage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pair: Any = torch.func.jvp(lambda z: torch.tanh(self.first(z)), (x,), (torch.ones_like(x),))
        return x + torch.func.vmap(self.last)(pair[0] + pair[1])


class Instances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.InstanceNorm1d(4, track_running_stats=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.tanh(self.norm(x.reshape(8, 4, WIDTH)).reshape(32, WIDTH)))


def in_math_attention(model: nn.Module, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        loss = loss_of(model(x))
    loss.backward()
    return loss


def in_cached_parametrizations(model: nn.Module, x: Tensor) -> Tensor:
    with parametrize.cached():
        loss = loss_of(model(x))
    loss.backward()
    return loss


def in_double(model: nn.Module, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        loss = loss_of(model(x))
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("make", "habit"),
    [
        (Norms, evaluating),
        (Attention, in_math_attention),
        (Orthogonal, in_cached_parametrizations),
        (Orthogonal, plain),
        (Recurrent, plain),
        (Recurrent, evaluating),
        (Unfilled, plain),
        (Gated, plain),
        (Tangents, plain),
        (Instances, plain),
        (Norms, in_double),
    ],
)
def test_contexts_that_have_ended_and_kernels_of_all_kinds(make: Callable[[], nn.Module], habit: Habit) -> None:
    expected = trained(net(make), habit)
    plan, model = recomputing(net(make)), net(make)
    with planner.apply(model, plan):
        assert_same(trained(model, habit), expected)


def test_what_is_saved_before_it_is_filled_is_kept() -> None:
    work = Workload(model=net(Noisy), inputs=(batch(),), loss=loss_of)
    profile = planner.profile(work, stages=["blocks.*"], menus=False)
    reasons = {stage.reason for stage in profile.stages if stage.module_class == "Noisy"}
    assert reasons == {"an op in it saves a tensor for backward before it fills it (rrelu its noise)"}
    expected = trained(net(Noisy), plain)
    model = net(Noisy)
    with planner.apply(model, planner.solve(profile, profile.unplanned_peak_bytes)):
        assert_same(trained(model, plain), expected)


def in_backward(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    torch.set_float32_matmul_precision("medium")
    try:
        loss.backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    return loss


def test_ops_that_a_second_run_leaves_for_later_run_under_the_flags_of_the_first() -> None:
    work = Workload(model=net(Attention), inputs=(batch(),), loss=loss_of)
    profile = planner.profile(work)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1)
    smallest = caught.value.minimum_budget_bytes
    expected = trained(net(Attention), in_backward)
    for share in (0.0, 0.2, 0.5):
        plan = planner.solve(profile, int(smallest + share * (profile.unplanned_peak_bytes - smallest)))
        model = net(Attention)
        with planner.apply(model, plan):
            assert_same(trained(model, in_backward), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
@pytest.mark.parametrize("permuted", [False, True])
def test_a_batch_that_backward_does_not_read_may_be_written_to(dtype: torch.dtype, permuted: bool) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh((x * 0.5).float())
            return y + self.inner(y)

    class FirstCasts(Net):
        cast: nn.Module

        def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
            return super().forward(self.cast(x))

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = FirstCasts([Norms() for _ in range(4)])
        model.cast = Cast()
        return model

    def given() -> Tensor:
        x = (batch() * 50).to(dtype)
        return x.t().contiguous().t() if permuted else x

    def habit(model: nn.Module, _: Tensor) -> Tensor:
        x = given()
        loss = loss_of(model(x))
        x.zero_()
        loss.backward()
        return loss

    expected = trained(build(), habit)
    model = build()
    with planner.apply(model, recomputing(build(), (given(),))):
        assert_same(trained(model, habit), expected)


def under_grad(model: nn.Module, x: Tensor) -> Any:
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return torch.func.grad(lambda w: loss_of(functional_call(model, w, (x,))))(weights)


def under_vmap(model: nn.Module, x: Tensor) -> Any:
    weights = {n: p.detach() for n, p in model.named_parameters()}
    each = torch.func.grad(lambda w, row: loss_of(functional_call(model, w, (row,))))
    return torch.func.vmap(each, in_dims=(None, 0))(weights, x.unsqueeze(1))


def under_jacrev(model: nn.Module, x: Tensor) -> Any:
    return torch.func.jacrev(lambda given: model(given))(x)


def under_jvp(model: nn.Module, x: Tensor) -> Any:
    return torch.func.jvp(lambda given: model(given), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("transform", [under_grad, under_vmap, under_jacrev, under_jvp], ids=lambda t: t.__name__)
def test_under_transforms_the_model_runs_without_the_plan_and_says_so_once(transform: Any) -> None:
    expected = transform(net(Plain), batch())
    model = net(Plain)
    with planner.apply(model, recomputing(net(Plain))), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_same(transform(model, batch()), expected)
        transform(model, batch())
        assert ["the plan does not act there" in str(warning.message) for warning in said] == [True]
        assert_same(trained(model, plain), trained(net(Plain), plain))


def test_what_a_transform_left_in_an_attribute_is_not_read() -> None:
    model = net(Recurrent)
    work = Workload(model=model, inputs=(batch(),), loss=loss_of)
    profile = planner.profile(work, stages=["blocks.*"], menus=False)
    with planner.apply(model, planner.state(profile, planner.Rule(modules="blocks.*"))), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        under_grad(model, batch())  # The list of its weights that an LSTM keeps holds stand-ins afterwards.
        expected = net(Recurrent)
        under_grad(expected, batch())
        assert_same(trained(model, plain), trained(expected, plain))


def test_a_second_run_that_saves_tensors_of_other_strides_is_refused() -> None:
    class Turning(nn.Module):
        turned = False

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.first(x))
            if Turning.turned:
                y = y.t().contiguous().t()
            return x + self.last(y * 2)

    def habit(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        Turning.turned = True
        try:
            loss.backward()
        finally:
            Turning.turned = False
        return loss

    model = net(Turning)
    with (
        planner.apply(model, recomputing(net(Turning))),
        pytest.raises(RuntimeError, match=r"float32 of shape \(32, 16\) with strides \(1, 32\).*not.*\(16, 1\)"),
    ):
        trained(model, habit)


@contextmanager
def _unsafe(kind: str) -> Iterator[None]:
    """Sets something of torch's, and back only where nothing is raised inside."""
    if kind == "flag":
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)
    elif kind == "autocast":
        torch.set_autocast_enabled("cpu", True)
        yield
        torch.set_autocast_enabled("cpu", False)
    else:
        torch.set_default_device("meta")
        yield
        torch.set_default_device(None)


@pytest.mark.parametrize("kind", ["flag", "autocast", "mode"])
def test_a_second_run_that_ends_early_leaves_nothing_set(kind: str) -> None:
    class Setting(Plain):
        def forward(self, x: Tensor) -> Tensor:
            with _unsafe(kind):
                return super().forward(x)

    expected, model = trained(net(Setting), plain), net(Setting)
    work = Workload(model=net(Setting), inputs=(batch(),), loss=loss_of)
    profile = planner.profile(work, stages=["blocks.*", "out"], menus=False)
    with planner.apply(model, planner.state(profile, planner.Rule(modules="blocks.*"))):
        assert_same(trained(model, plain), expected)
    assert torch.get_default_dtype() is torch.float32 and not torch.is_autocast_enabled("cpu")
    assert torch.empty(0).device.type == "cpu"


@pytest.mark.parametrize("name", by_day(SCHEDULES, list(SCHEDULES)[-1:]))
def test_hooks_around_the_model_hold_the_parameters_that_planned_stages_save(name: str) -> None:
    """They have copied them: backward takes these, whatever ``.data`` is by then."""

    def gradients(model: nn.Module) -> list[Tensor | None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            loss = model(inputs).square().mean()
        for parameter in model.parameters():
            parameter.data = 2 * parameter.data
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(Norms() for _ in range(4)))
        model[1].requires_grad_(False)
        return model

    inputs = batch()
    work = Workload(model=build(), inputs=inputs, loss=lambda output: output.square().mean())
    plan = planned(planner.profile(work), SCHEDULES[name])
    expected, model = gradients(build()), build()
    with planner.apply(model, plan), pytest.warns(RuntimeWarning, match="hooks around the model"):
        assert_same(gradients(model), expected)
