"""Where random numbers decide what a step runs, the profile says so; where all of it runs, it says nothing."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.measurement.unsteady_bytes import largest_step
from profiler.workload.random_states import RandomState
from profiler.workload.snapshot import preserved
from profiler.workload.workload import Workload
from tests.support.drawn_depth import DEPTH, DRAWS, drawing, running_everything, seed_all
from tests.support.odd_models import workload


def said_of(work: Workload, *, keeps: bool = True) -> tuple[str, ...]:
    with preserved(work):
        found = largest_step(work, RandomState(), keeps=keeps)
    return () if found is None else (found.said,)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.slow
def test_random_numbers_that_decide_what_runs_are_told(name: str, keeps: bool) -> None:
    work = drawing(name)
    seed_all(3)
    before = RandomState()
    (line,) = said_of(work, keeps=keeps)
    assert "random numbers decide what runs" in line and "profile the largest step" in line
    assert not before.torch_differs() and not before.host_differs()
    with running_everything(work, name):
        assert said_of(work, keeps=keeps) == ()


@pytest.mark.parametrize(("name", "forwards"), [("plain", 1), ("dropout", 4), ("batchnorm", 1)])
def test_nothing_is_told_where_nothing_drawn_decides(name: str, forwards: int) -> None:
    work = workload(name)
    calls: SimpleQueue[None] = SimpleQueue()  # What a list counted would be put back.
    hook = work.model.register_forward_pre_hook(lambda *_: calls.put(None))
    assert said_of(work) == ()
    hook.remove()
    assert calls.qsize() == forwards


def test_a_profile_tells_it_and_so_does_the_plan_that_is_applied() -> None:
    work = drawing("tensor")
    seed_all(0)
    profile = planner.profile(work, menus=False)
    (line,) = profile.unsteady
    assert "random numbers decide what runs" in line
    plan = planner.solve(profile, "100%")
    with pytest.warns(RuntimeWarning, match="random numbers decide what runs"):
        planner.apply(work.model, plan).remove()


@pytest.mark.parametrize("name", ["tensor", "python_exit", "inside"])
@pytest.mark.slow
def test_the_largest_of_the_steps_drawn_is_profiled(name: str) -> None:
    """Of 16 steps that leave out no layer with a chance of 0.6 ** 6, or go to the last with one of 1 / 6."""
    work = drawing(name)
    seed_all(0)
    before = RandomState()
    with preserved(work):
        most_calls = max(_calls(work) for _ in range(16))
    before.restore()
    profile = planner.profile(work, menus=False)
    (line,) = profile.unsteady
    assert f" {most_calls} calls of modules in the profiled step, the largest of 16" in line
    with running_everything(work, name):
        largest = planner.profile(work, menus=False)
    assert profile.unplanned_peak_bytes <= largest.unplanned_peak_bytes


def _calls(work: Workload) -> int:
    """The number of calls of modules in a step."""
    calls: SimpleQueue[None] = SimpleQueue()
    hooks = [module.register_forward_pre_hook(lambda *_: calls.put(None)) for module in work.model.modules()]
    work.step(until="backward")
    for hook in hooks:
        hook.remove()
    return calls.qsize()


@pytest.mark.slow
def test_experts_of_the_largest_step_that_it_did_not_call_are_unseen() -> None:
    work = drawing("experts")
    with running_everything(work, "experts"):
        profile = planner.profile(work, menus=False)
    assert profile.unsteady == ()
    assert profile.resident.optimizer == sum(2 * p.numel() * 4 + 4 for p in work.model.parameters())
    assert len(profile.unseen) == 2 * DEPTH


class Tasks(torch.nn.Module):
    """A head of three layers, and one of nine."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleDict(
            {
                name: torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(count)])
                for name, count in (("a", 3), ("b", 9))
            }
        )

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](x)


def by_torch() -> str:
    return "ab"[int(torch.randint(0, 2, ()))]


def by_python() -> str:
    return random.choice("ab")


@pytest.mark.parametrize("draw", [by_torch, by_python])
def test_a_loop_that_draws_its_task_before_the_forward_is_told(draw: Callable[[], str]) -> None:
    seed_all(1)
    model, x = Tasks(), torch.randn(64, 16)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        task = draw()
        optimizer.zero_grad()
        model(x, task).square().mean().backward()
        optimizer.step()

    profile = planner.profile(Workload(model=model, step=step, optimizer=optimizer), menus=False)
    assert any("random numbers decide what runs" in line for line in profile.unsteady)


def test_a_forward_alone_leaves_no_note_of_hooks_for_a_backward() -> None:
    """As per-sample gradients note activations: taken in backward, and nothing may be left as the optimizer steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)])
    weights = [layer[0].weight for layer in model]  # type: ignore[index]
    for layer, weight in zip(model, weights, strict=True):
        weight.waiting = 0

        def forward(module: Any, arguments: Any, output: Tensor, weight: Any = weight) -> None:
            weight.waiting += 1
            output.register_hook(lambda _: setattr(weight, "waiting", weight.waiting - 1))

        layer[0].register_forward_hook(forward)  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        if any(weight.waiting for weight in weights):  # type: ignore[attr-defined]
            raise ValueError("a forward without its backward")
        optimizer.step()

    planner.profile(planner.Workload(model, step=step, optimizer=optimizer))
    assert [weight.waiting for weight in weights] == [0, 0, 0]  # type: ignore[attr-defined]


class Circular(nn.Module):
    """Leaves a copy of what it returns in a list that holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        circle: list[object] = [y.detach().clone()]
        circle.append(circle)
        return y


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.slow
def test_tensors_in_reference_cycles_are_counted(limited: bool) -> None:
    model, x = nn.Sequential(Circular(), Circular()), torch.randn(64, 16)

    def step(collects: bool) -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        if collects:
            gc.collect()

    limit = "64MiB" if limited else None
    profile = planner.profile(Workload(model=model, step=lambda: step(False)), menus=False, limit=limit)
    (cause,) = profile.unsteady
    assert cause.startswith(f"each step leaves {2 * 64 * 16 * 4} bytes of tensors in reference cycles")
    collecting = planner.profile(Workload(model=model, step=lambda: step(True)), menus=False, limit=limit)
    assert collecting.unsteady == ()
