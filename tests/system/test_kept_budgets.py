"""Steps keep their budget where single stages, hooks or optimizers take bytes that are easily overlooked."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.measurement.assembly import alike
from profiler.measurement.meter import memory_meter, metered
from profiler.trace.partition import choose_stages
from profiler.trace.step_trace import trace_step
from profiler.workload.steps import resident_bytes_of
from tests.support.exactness import budgets


def peaks_of_steps(work: planner.Workload, plan: planner.Plan, steps: int = 3) -> list[int]:
    """Most bytes alive at once in each of some planned steps."""
    peaks = []
    with planner.apply(work.model, plan):
        for _ in range(steps):
            work.zero_grad()
            gc.collect()
            meter = memory_meter(work.device, resident_bytes_of(work).total)
            peaks.append(metered(meter, work.step).peak_bytes)
    return peaks


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
    model = nn.Sequential(*(TinyStage() for _ in range(6)))
    model[1].linear.register_full_backward_pre_hook(lambda module, gradient: None)
    next(model[2].parameters()).register_hook(lambda gradient: gradient)
    next(model[3].parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    work = planner.Workload(model=model, inputs=torch.randn(16, 8, requires_grad=True), loss=squared)
    kinds = alike(choose_stages(trace_step(work), [TinyStage]))
    assert kinds[0] == kinds[4] == kinds[5] and len(set(kinds)) == 4


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
    assert max(peaks_of_steps(work, plan, steps=8)) == profile.unplanned_peak_bytes
