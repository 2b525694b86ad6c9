"""A function that is run again gives what it would have given, in less memory, wherever it is used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import planner
from planner import Rule, Rules, recompute
from tests.support.exactness import assert_same, state_after

WIDTH = 32
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class Mlp(nn.Module):
    """What lies between its input and its sum is one function."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner = wrap(self.between)

    def between(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def made(wrap: Wrap, autocast: torch.dtype | None = None) -> planner.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*[Mlp(wrap) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda y: y.float().square().mean()  # noqa: E731
    inputs = torch.randn(128, WIDTH)
    return planner.Workload(model=model, inputs=inputs, loss=loss, optimizer=optimizer, autocast=autocast)


def peak(work: planner.Workload) -> int:
    return planner.measure(work, repeats=1).peak_bytes


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: checkpoint(function, *args, use_reentrant=False)


WRAPS: dict[str, Wrap] = {
    "once": recompute,
    "in itself": lambda f: recompute(recompute(f)),
    "inside of checkpoint": lambda f: checkpointed(recompute(f)),
    "around checkpoint": lambda f: recompute(checkpointed(f)),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_it_is_exact_and_keeps_no_more_than_checkpointing(wrap):
    assert_same(state_after(made(wrap)), state_after(made(plainly)))
    assert peak(made(wrap)) <= 1.001 * peak(made(checkpointed)) < 0.7 * peak(made(plainly))


def test_it_casts_under_autocast_as_forward_did():
    assert_same(state_after(made(recompute, torch.bfloat16)), state_after(made(plainly, torch.bfloat16)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        Rules(rules=[Rule(modules="Mlp")]),
        Rules(checkpoints="3"),
        Rules(checkpoints=["1"], rules=[Rule(modules="2", ops="gelu")]),
        Rules(rules=[Rule(modules="*", ops="*")]),
    ],
)
@pytest.mark.parametrize("half", [False, True])
def test_inside_of_a_planned_model_bytes_are_as_predicted(rules, half):
    """With ``half`` only a part of what a block does is the function."""
    wrap: Wrap = (lambda f: lambda x: recompute(lambda y: f(y))(torch.tanh(x))) if half else recompute
    profile = planner.profile(made(wrap), stages=["Mlp"], rules=rules, menus=False)
    plan, work = planner.state(profile, rules), made(wrap)
    with planner.apply(work.model, plan):
        assert_same(state_after(work), state_after(made(wrap)))
        assert peak(work) == plan.predicted_peak_bytes


def compare(function: Callable[..., Any], *shapes: tuple[int, ...], repeat: int = 1) -> None:
    """The function wrapped and plain: outputs, gradients and random state, bit for bit."""

    def run(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(3)
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        output = sum(call(*inputs).square().sum() for _ in range(repeat))
        assert isinstance(output, Tensor)
        gradients = torch.autograd.grad(output, inputs, allow_unused=True)
        return [output.detach(), *(g for g in gradients if g is not None), torch.get_rng_state()]

    for expected, found in zip(run(function), run(recompute(function)), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    "function",
    [lambda x: F.affine_grid(x, [4, 1, 8, 8], align_corners=False).sin().float(), lambda x: nn.Bilinear(3, 3, 2)(x, x)],
    ids=["affine grid", "bilinear"],
)
def test_kernels_that_cast_within_themselves_do_so_inside_of_it(function: Callable[..., Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        compare(function, (4, 2, 3))


def changes_own_tensors(x: Tensor) -> Tensor:
    h = x + 1
    h[:, 1:] *= 2
    return h.relu_().mul(x).add_(x).sin()


def changes_what_it_read(x: Tensor) -> Tensor:
    """To make ``h`` again later, another ``y`` would be read."""
    y = x * 2
    h = (y + 1).sin()
    with torch.no_grad():
        y.add_(5)
    return h.cos() * y.detach()


def views(x: Tensor) -> Tensor:
    left, right = x.t().chunk(2)
    return torch.cat([left.exp().unfold(1, 2, 1).sum(-1), right.sin()[:, 1:]]).tanh()


def draws(x: Tensor) -> Tensor:
    noise = torch.rand_like(x) + torch.randn(x.shape)
    return F.dropout(torch.bernoulli(noise.sigmoid()) * x.exp(), 0.3).cos()


def leaves_gradients_out(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax().exp()
    return (x / scale).tanh() * x.detach().sin()


def has_branches(x: Tensor) -> Tensor:
    return x.exp().sin() if x.detach().sum().item() > 0 else x.cos().tan()


def differentiates_itself(x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(y.sin().exp().sum(), y)
    return (slope * x.tanh()).exp()


FUNCTIONS = (
    changes_own_tensors,
    changes_what_it_read,
    views,
    draws,
    leaves_gradients_out,
    has_branches,
    differentiates_itself,
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("repeat", [1, 3])
def test_functions_with_habits_are_exact(function, repeat):
    compare(function, (6, 8), repeat=repeat)


def test_an_input_changed_inside_is_changed_once():
    def run(call: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x, buffer = torch.randn(4, 4, requires_grad=True), torch.ones(4)
        call(x, buffer).sum().backward()
        assert x.grad is not None
        return x.grad, buffer

    def scaled(x: Tensor, buffer: Tensor) -> Tensor:
        h = (x * buffer.clone()).exp()
        buffer.mul_(0.5)
        return (h + buffer).sin()

    for expected, found in zip(run(scaled), run(recompute(scaled)), strict=True):
        assert torch.equal(expected, found)


def test_batch_norm_counts_every_call_once():
    def run(wrap: Wrap) -> dict[str, Any]:
        torch.manual_seed(0)
        norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8))
        call = wrap(norm)
        first, second = call(torch.randn(16, 8)), call(torch.randn(16, 8))
        (second.square().sum() + first.sin().sum()).backward()
        return {**norm.state_dict(), **{name: p.grad for name, p in norm.named_parameters()}}

    assert_same(run(recompute), run(plainly))


def test_an_own_generator_is_drawn_from_once_and_what_it_gave_is_kept():
    def run(wrap: Wrap) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(5)
        x = torch.linspace(0, 1, 12, requires_grad=True)
        y = wrap(lambda t: (t.exp() * torch.rand(12, generator=generator)).sin())(x)
        y.sum().backward()
        assert x.grad is not None
        return x.grad, generator.get_state()

    for expected, found in zip(run(plainly), run(recompute), strict=True):
        assert torch.equal(expected, found)


def test_its_code_runs_once():
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(x)
        return x.exp().sin()

    x = torch.ones(3, requires_grad=True)
    recompute(counted)(x).sum().backward()
    assert len(calls) == 1


def test_without_gradients_it_is_the_function_itself():
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(torch._C._len_torch_dispatch_stack())
        return x.exp()

    wrapped = recompute(look)
    with torch.no_grad():
        wrapped(torch.ones(2, requires_grad=True))
    with torch.inference_mode():
        wrapped(torch.ones(2))
    assert seen == [0, 0]
    assert not wrapped(torch.ones(2)).requires_grad


def test_a_module_in_eval_mode_is_exact_too():
    def gradient(wrap: Wrap) -> Tensor:
        work = made(wrap)
        work.model.eval()
        work.forward().backward()
        return torch.cat([p.grad.flatten() for p in work.model.parameters() if p.grad is not None])

    assert torch.equal(gradient(recompute), gradient(plainly))


def test_callables_of_every_kind():
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, x: Tensor) -> Tensor:
            return (x * self.by).exp()

        @recompute
        def method(self, x: Tensor, *, power: int = 1) -> Tensor:
            """Its words."""
            return (x * self.by).exp() ** power

    x = torch.ones(3, requires_grad=True)
    linear = nn.Linear(3, 3)
    triple: Callable[..., Any] = functools.partial(torch.mul, other=torch.tensor(3.0))
    calls: list[Callable[..., Any]] = [Scale(2.0), triple, linear, lambda t: t.sin()]
    for call in calls:
        (expected,), (found,) = (torch.autograd.grad(each(x).sum(), x) for each in (call, recompute(call)))
        assert torch.equal(expected, found)
    assert torch.equal(Scale(2.0).method(x, power=2), x.mul(2).exp() ** 2)
    assert Scale.method.__name__ == "method" and Scale.method.__doc__ == "Its words."
    assert recompute(F.gelu).__name__ == "gelu"
    assert not hasattr(recompute(linear), "weight")


def test_what_is_no_function_is_refused():
    def numbers():
        yield 1

    async def later() -> None: ...

    for wrong, words in ((3, "a function, got int"), (numbers, "generator"), (later, "coroutine")):
        with pytest.raises(ValueError, match=words):
            recompute(wrong)  # type: ignore[arg-type]


def test_a_retained_graph_goes_backward_twice_and_a_part_of_it_alone():
    work = made(recompute)
    parameters = list(work.model.parameters())
    loss = work.forward()
    first = torch.autograd.grad(loss, parameters[:3], retain_graph=True)
    every = torch.autograd.grad(loss, parameters, retain_graph=True)
    again = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, every[:3], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(every, again, strict=True))


def test_second_derivatives_are_exact():
    def curvature(call: Callable[..., Any]) -> Tensor:
        x = torch.linspace(0, 1, 9, requires_grad=True)
        (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(slope.square().sum(), x)
        return found

    wavy = lambda t: t.exp().sin() * t.tanh()  # noqa: E731
    assert torch.equal(curvature(recompute(wavy)), curvature(wavy))


def test_two_forwards_may_go_backward_in_any_order():
    def gradient(wrap: Wrap) -> list[Tensor]:
        torch.manual_seed(1)
        work = made(wrap)
        first, second = work.forward(), work.forward()
        first.backward()
        second.backward()
        return [p.grad for p in work.model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradient(recompute), gradient(plainly), strict=True))


@pytest.mark.slow
def test_compiled_models_recompute_it_the_compiler_s_way():
    def gradient(wrap: Wrap, compiled: bool) -> Tensor:
        work = made(wrap)
        work.model.eval()  # The compiler draws random numbers of its own.
        call = torch.compile(work.model, backend="aot_eager", fullgraph=True) if compiled else work.model
        call(work.inputs).square().sum().backward()
        return torch.cat([p.grad.flatten() for p in work.model.parameters() if p.grad is not None])

    assert torch.allclose(gradient(recompute, True), gradient(plainly, False), rtol=1e-4, atol=1e-4)
