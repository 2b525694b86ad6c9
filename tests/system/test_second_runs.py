"""A second run sees exactly what the first one saw, whatever was changed in between; else it is refused in words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
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

WIDTH = 16
SETTINGS = {"factor": 1.0}  # out of sight of every module


class Block(nn.Module):
    """Reads everything that a block may read: attributes, containers, objects, buffers, a counter."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(2 * WIDTH), nn.Dropout(dropout)
        self.condition: Tensor | None = None
        self.calls = 0
        self.scale = 1.0
        self.history = [1.0]
        self.context = SimpleNamespace(time=1.0)
        self.mean = torch.zeros(WIDTH)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("codebook", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:  # in some steps only
            self.codebook.mul_(0.9)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        y = x * self.scale * self.history[-1] * self.context.time * SETTINGS["factor"] * (1 + 0.1 * (self.calls % 3))
        y = y * self.codebook.clone() + self.mean.clone() + torch.rand(WIDTH, generator=self.generator)
        if self.condition is not None:
            y = y * self.condition
        return x + self.last(self.dropout(torch.nn.functional.gelu(self.norm(self.first(y)))))


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(blocks), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        for k, block in enumerate(self.blocks):
            if condition is not None:
                block.condition = condition * (1 + k)
            x = block(x)
        return self.out(x)


def net(make: Callable[[], nn.Module] = lambda: Block(0.1), blocks: int = 4) -> Net:
    torch.manual_seed(0)
    return Net([make() for _ in range(blocks)])


def batch() -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(5))


def loss_of(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def recomputing(model: nn.Module, inputs: Any = None) -> planner.Plan:
    """A plan under the smallest budget: most of the blocks run again."""
    work = Workload(model=model, inputs=(batch(),) if inputs is None else inputs, loss=loss_of)
    profile = planner.profile(work, menus=False)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1)
    plan = planner.solve(profile, caught.value.minimum_budget_bytes)
    assert sum(stage.decision == "recompute" for stage in plan.stages) >= 2
    return plan


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    return recomputing(net())


Habit = Callable[[nn.Module, Tensor], Tensor]


def trained(model: nn.Module, habit: Habit, steps: int = 4) -> dict[str, Any]:
    """What some steps by a loop with this habit leave; it returns the loss of each once its backward is over."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        losses.append(habit(model, batch()).item())
        optimizer.step()
    kinds = (bool, int, float, Tensor)
    attributes = [{n: v for n, v in vars(m).items() if isinstance(v, kinds)} for m in model.modules()]
    return {
        "losses": losses,
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "state": dict(model.state_dict()),
        "attributes": {str(k): values for k, values in enumerate(attributes)},
        "random": torch.get_rng_state(),
    }


def blocks_of(model: nn.Module) -> list[Any]:
    return list(model.blocks)


def plain(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    loss.backward()
    return loss


def evaluating(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    model.eval()
    loss.backward()
    return loss


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
    weights = dict(model.named_parameters())
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
    *(other_data, other_flags, zeroed_batch, functional, meta_learning, seeded_between),
]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_what_changes_between_forward_and_backward_changes_no_gradient(plan: planner.Plan, habit: Habit) -> None:
    expected = trained(net(), habit)
    model = net()
    with warnings.catch_warnings(), planner.apply(model, plan):
        warnings.simplefilter("error")
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


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        (written_data, r"stage 'blocks\.\d'.*other values.*written through \.data.*keep this stage"),
        (other_global, r"stage 'blocks\.\d'.*other values.*a global.*keep this stage"),
        (stepped, r"stage 'blocks\.\d'.*'bias', a parameter.*changed in place.*call backward before"),
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


class Noisy(nn.Module):
    """The noise that it saves is memory that nothing has filled where its input is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(nn.functional.rrelu(self.first(x), training=True))


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
        (Noisy, plain),
        (Instances, plain),
        (Norms, in_double),
    ],
)
def test_contexts_that_have_ended_and_kernels_of_all_kinds(make: Callable[[], nn.Module], habit: Habit) -> None:
    expected = trained(net(make), habit)
    plan, model = recomputing(net(make)), net(make)
    with planner.apply(model, plan):
        assert_same(trained(model, habit), expected)


def test_a_norm_that_is_added_after_apply_is_updated_once(plan: planner.Plan) -> None:
    def with_norms(model: Net) -> Net:
        for block in blocks_of(model):
            block.last = nn.Sequential(block.last, nn.BatchNorm1d(WIDTH))
        return model

    expected = trained(with_norms(net()), plain)
    model = net()
    with planner.apply(model, plan):
        assert_same(trained(with_norms(model), plain), expected)


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


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


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
