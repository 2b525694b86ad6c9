"""Steps keep their budget where single stages, hooks or optimizers take bytes that are easily overlooked."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

import planner
from profiler.trace.partition import alike, choose_stages
from profiler.trace.step_trace import trace_step
from tests.support.exactness import budgets
from tests.support.step_peaks import peaks_of_steps


class TinyStage(nn.Module):
    """Its forward takes fewer bytes than torch's random state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


@pytest.mark.slow
def test_the_random_state_that_second_runs_of_tiny_stages_read_is_within_the_budget() -> None:
    torch.manual_seed(0)
    work = planner.Workload(
        model=nn.Sequential(*(TinyStage() for _ in range(40))),
        inputs=torch.randn(16, 8),
        loss=lambda output: output.square().mean(),
    )
    profile = planner.profile(work, menus=False)
    for budget in (*budgets(profile), profile.unplanned_peak_bytes):
        plan = planner.solve(profile, budget, solver="rotor")
        assert max(peaks_of_steps(work, plan)) <= plan.predicted_peak_bytes <= budget
    assert {stage.decision for stage in plan.stages} == {"keep"}


class HookedSolver(nn.Module):
    """Its backward solves for a gradient in a hook, along a graph that the hook holds (a deep-equilibrium block)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.inner(z) + self.outer(x))

    def forward(self, x: Tensor) -> Tensor:
        z = self.step(torch.zeros_like(x), x)
        start = z.detach().clone().requires_grad_()
        if torch.is_grad_enabled():
            end = self.step(start, x)

            def solve(gradient: Tensor) -> Tensor:
                found = gradient
                for _ in range(3):
                    found = torch.autograd.grad(end, start, found, retain_graph=True)[0] + gradient
                return found

            z.register_hook(solve)
        return self.norm(z + x)


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.slow
def test_what_a_hook_holds_after_backward_is_not_there_twice() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(HookedSolver() for _ in range(5)))
    work = planner.Workload(model=model, inputs=torch.randn(256, 32), loss=squared)
    profile = planner.profile(work)
    assert any("a hook with a graph of its own" in stage.reason for stage in profile.stages)
    for budget in (*budgets(profile), profile.unplanned_peak_bytes):
        plan = planner.solve(profile, budget, solver="rotor")
        assert max(peaks_of_steps(work, plan)) <= budget


def test_stages_with_hooks_of_their_own_are_not_alike() -> None:
    stages = [TinyStage() for _ in range(6)]
    model = nn.Sequential(*stages)
    stages[1].linear.register_full_backward_pre_hook(lambda module, gradient: None)
    next(stages[2].parameters()).register_hook(lambda gradient: gradient)
    next(stages[3].parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    work = planner.Workload(model=model, inputs=torch.randn(16, 8, requires_grad=True), loss=squared)
    kinds = alike(choose_stages(trace_step(work), [TinyStage]))
    assert kinds[0] == kinds[4] == kinds[5] and len(set(kinds)) == 4


class Masked(nn.Module):
    """Keeps what is positive: how much that is depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + y[y > 0].exp().sum()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 3:
            x = torch.tanh(self.linear(x)) / 2
        return self.linear(x)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(100, 8, sparse=True)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.rows((x * 10).long() % 100))


def orthogonal_layers() -> nn.Module:
    return nn.Sequential(*(orthogonal(nn.Linear(8, 8)) for _ in range(3)))


def stepping_in_backward() -> nn.Module:
    model = nn.Sequential(TinyStage(), TinyStage())
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    return model


momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
UNSTEADY: list[tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer], str]] = [
    (orthogonal_layers, momentum, "linalg_matrix_exp in '0.parametrizations.weight.0' and 2 other modules"),
    (
        lambda: nn.Sequential(Masked(), Masked()),
        momentum,
        "index in '0' and 1 other module: its bytes depend on values",
    ),
    (lambda: nn.Sequential(Branching(), Branching()), momentum, "a value by which Python may branch in '0'"),
    (stepping_in_backward, torch.optim.SGD, "a hook runs once the gradient of '0.linear.weight' is complete"),
    (Bag, torch.optim.SGD, "the gradient of 'rows.weight' is sparse"),
    (Bag, momentum, "'momentum_buffer' is sparse, and grows from step to step"),
]


@pytest.mark.parametrize(("model", "optimizer", "what"), UNSTEADY)
def test_bytes_that_are_others_in_other_steps_are_said_before_the_first_step(
    model: Callable[[], nn.Module], optimizer: Callable[..., torch.optim.Optimizer], what: str
) -> None:
    torch.manual_seed(0)
    made = model()
    work = planner.Workload(model=made, inputs=torch.rand(16, 8), loss=squared, optimizer=optimizer(made.parameters()))
    profile = planner.profile(work, menus=False)
    assert any(what in line for line in profile.unsteady)
    plan = planner.solve(profile, "100%")
    with pytest.warns(RuntimeWarning, match="peak is not promised: .* Solve with headroom") as caught:
        planner.apply(made, plan).remove()
    assert what in str(caught[0].message) and caught[0].filename == __file__
    assert planner.Plan.from_document(plan.to_document(), "a plan").unsteady == profile.unsteady


class Edges(nn.Module):
    """Layers over the edges of a graph but for its loops, as graph networks have; and times that are all different."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        assert torch.arange(4).unique().numel() == 4
        for layer in self.layers:
            kept = edges[:, edges[0] != edges[1]]
            x = x.index_add(0, kept[1], layer(x)[kept[0]].relu())
        return x


def test_an_index_that_is_the_same_in_every_step_is_no_reason_to_warn(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, x, edges = Edges(), torch.rand(20, 8), torch.randint(20, (2, 60))
    work = planner.Workload(model=model, inputs=(x, edges), loss=squared)
    profile = planner.profile(work, menus=False)
    assert profile.unsteady == ()
    assert profile.batch_sized == ("index in the model: its bytes depend on values",)
    with planner.apply(model, planner.solve(profile, "100%")):
        for _ in range(3):
            squared(model(x, edges)).backward()
            model.zero_grad()
        assert [str(w.message) for w in recwarn if issubclass(w.category, RuntimeWarning)] == []
        for _ in range(3):
            squared(model(x, torch.randint(20, (2, 60)))).backward()
            model.zero_grad()
    (said,) = [str(w.message) for w in recwarn if issubclass(w.category, RuntimeWarning)]
    assert "is not that of the step before" in said and "index in the model" in said


def test_a_batch_that_is_filled_again_is_another_one(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    model, x, edges = Edges(), torch.rand(20, 8), torch.randint(20, (2, 60))
    profile = planner.profile(planner.Workload(model=model, inputs=(x, edges), loss=squared), menus=False)
    with planner.apply(model, planner.solve(profile, "100%")):
        squared(model(x, edges)).backward()
        edges.random_(20)
        squared(model(x, edges)).backward()
    assert any("is not that of the step before" in str(w.message) for w in recwarn)


class Counting(nn.Module):
    """Takes more rows in every step: what decides lies in a buffer that the step itself changes."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(len(x)) < self.steps.add_(1)
        return x.sum() + self.linear(x)[mask].sum()


@pytest.mark.parametrize("drawn", [False, True])
def test_what_a_step_changes_or_draws_itself_is_said_before_the_first_step(drawn: bool) -> None:
    model = nn.Linear(8, 8) if drawn else Counting()
    x, optimizer = torch.rand(16, 8), torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x[torch.rand(16) < 0.5] if drawn else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    profile = planner.profile(planner.Workload(model=model, step=step, optimizer=optimizer), menus=False)
    assert any("index" in line for line in profile.unsteady)


class Leaving(nn.Module):
    """A layer of several that a number decides, which a fresh tensor is filled with: drawn, or from the batch."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        self.layers, self.drawn = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), drawn

    def forward(self, x: Tensor) -> Tensor:
        number = torch.zeros(3)
        number.uniform_() if self.drawn else number.copy_(self.layers[0](x)[0, :3].detach())
        for layer, leave in zip(self.layers, number < -1e6, strict=True):
            if not leave:
                x = layer(x).relu()
        return x


@pytest.mark.parametrize("drawn", [True, False])
def test_a_branch_by_numbers_drawn_in_place_is_no_reason_to_warn(drawn: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Leaving(drawn), nn.Linear(8, 8))
    work = planner.Workload(model=model, inputs=torch.rand(4, 8), loss=squared)
    assert bool(planner.profile(work, stages=["0", "1", "2"], menus=False).unsteady) is not drawn


class Growing(torch.optim.SGD):
    """Remembers every gradient."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("history", []).append(parameter.grad.clone())
        super().step()


def test_states_that_grow_are_said_and_steady_steps_are_promised() -> None:
    said = {}
    for optimizer in (Growing, momentum, torch.optim.AdamW):
        model = nn.Sequential(TinyStage(), TinyStage())
        work = planner.Workload(
            model=model, inputs=torch.rand(16, 8), loss=squared, optimizer=optimizer(model.parameters(), lr=0.1)
        )
        profile = planner.profile(work, menus=False)
        said[optimizer] = profile.unsteady
    (line,) = said.pop(Growing)
    assert "the optimizer's states grow from step to step: by" in line
    assert set(said.values()) == {()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planner.apply(model, planner.solve(profile, "100%"))


@pytest.mark.parametrize(
    "optimizer",
    [functools.partial(torch.optim.RAdam, foreach=False), functools.partial(torch.optim.ASGD, t0=3), torch.optim.NAdam],
)
def test_what_an_optimizer_does_late_in_training_is_within_the_budget(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
    work = planner.Workload(
        model=model, inputs=torch.rand(4, 48), loss=squared, optimizer=optimizer(model.parameters())
    )
    profile = planner.profile(work, menus=False)
    plan = planner.solve(profile, "100%")
    assert max(peaks_of_steps(work, plan, steps=8)) == profile.unplanned_peak_bytes and not profile.unsteady


class Weighing(nn.Module):
    """Returns besides what nobody uses, and what autograd saves for that: attention weights, say."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 8 * width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.last(torch.tanh(self.first(x))), torch.tanh(torch.sigmoid(self.side(x)))


class Weighed(nn.Module):
    """Lets go of what its last block returned besides once it returns itself."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Weighing() for _ in range(4)), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            outputs = block(x)
            x = outputs[0]
        return self.norm(x)


def test_what_a_later_stage_lets_go_of_is_not_counted_twice() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Weighed(), nn.Linear(32, 1))
    work = planner.Workload(model=model, inputs=torch.randn(256, 32), loss=lambda output: output.square().mean())
    profile = planner.profile(work, stages=["0.blocks.*", "0.norm", "1"])
    for budget in (*budgets(profile), profile.unplanned_peak_bytes):
        plan = planner.solve(profile, budget, solver="rotor")
        assert max(peaks_of_steps(work, plan)) <= plan.predicted_peak_bytes <= budget


class Discarding(nn.Module):
    """Computes what nobody uses: what autograd saved for that goes at once, in a second run as in the first one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 8 * width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            torch.tanh(torch.sigmoid(self.side(x)))
        return x + self.last(torch.tanh(self.first(x)))


def test_second_runs_keep_nothing_of_what_went_in_the_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Discarding() for _ in range(4)), nn.Linear(32, 1))
    work = planner.Workload(model=model, inputs=torch.randn(256, 32), loss=lambda output: output.square().mean())
    for rule in (planner.Rule(modules="[0-3]"), planner.Rule(modules="[0-3]", ops="tanh")):
        plan = planner.state(planner.profile(work, stages=["*"], rules=[rule]), rule)
        assert max(peaks_of_steps(work, plan)) <= plan.predicted_peak_bytes
