"""The largest step of models that draw what they run is found, and is the one that a profile measures."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

import planner
from profiler.measurement.largest_step import DrawnStep, largest_steps
from profiler.workload.snapshot import RandomState, preserved
from profiler.workload.workload import Workload
from tests.support.drawn_depth import DEPTH, DRAWS, RATE, Drawing, Layer, drawing, seed_all
from tests.support.odd_models import workload


def steps_of(work: Workload) -> list[DrawnStep]:
    with preserved(work):
        return largest_steps(work, RandomState.capture())


def layers_of(work: Any) -> list[Any]:
    return list(work.model.layers)


def layers_run(work: Workload, step: DrawnStep) -> int:
    """How many layers run to their end."""
    ran: list[None] = []
    hooks = [layer.dropout.register_forward_hook(lambda *_: ran.append(None)) for layer in layers_of(work)]
    with preserved(work), step.drawn():
        step.randomness.restore()
        work.forward()
        count = len(ran)  # The list is put back too.
    for hook in hooks:
        hook.remove()
    return count


@pytest.mark.parametrize("name", DRAWS)
def test_every_layer_runs_in_the_largest_step(name: str) -> None:
    work = drawing(name)
    seed_all(3)
    *others, largest = steps_of(work)
    assert layers_run(work, largest) == DEPTH
    modules = {module for step in (*others, largest) for module, _ in step.calls}
    assert set(layers_of(work)) <= modules


def test_places_may_differ_in_which_numbers_make_them_run() -> None:
    def draw(layers: torch.nn.ModuleList) -> Iterator[torch.nn.Module]:
        for layer in layers[:3]:
            if torch.rand(()).item() < RATE:
                continue
            yield layer
        for layer in layers[3:]:
            if torch.rand(()).item() < RATE:
                yield layer

    work = drawing("tensor")
    model: Any = work.model
    model.draw = draw
    seed_all(0)
    assert layers_run(work, steps_of(work)[-1]) == DEPTH


@pytest.mark.parametrize("name", ["plain", "dropout", "batchnorm"])
def test_one_forward_is_all_where_nothing_drawn_decides(name: str) -> None:
    work = workload(name)
    calls: SimpleQueue[None] = SimpleQueue()  # What a list counted would be put back.
    hook = work.model.register_forward_pre_hook(lambda *_: calls.put(None))
    (step,) = steps_of(work)
    hook.remove()
    assert calls.qsize() == 1
    assert not step.instead


def test_a_number_that_a_model_cannot_read_is_left_out() -> None:
    def draw(layers: torch.nn.ModuleList) -> Iterator[torch.nn.Module]:
        if torch.rand(()) > 2:
            raise ValueError("never drawn")
        yield from layers

    work = Workload(model=Drawing(draw, [Layer()]), inputs=torch.randn(4, 32), loss=Tensor.sum)
    assert layers_run(work, steps_of(work)[-1]) == 1


@pytest.mark.slow
def test_a_profile_is_of_the_largest_step_whatever_is_drawn_first() -> None:
    profiles = []
    for seed in (0, 1, 2):
        work = drawing("tensor")
        seed_all(seed)
        before = RandomState.capture()
        profiles.append(planner.profile(work, menus=False))
        assert not before.torch_differs()
        assert not before.host_differs()
    assert len({profile.unplanned_peak_bytes for profile in profiles}) == 1
    assert [stage.name for stage in profiles[0].stages if stage.name.startswith("layers")] == [
        f"layers.{k}" for k in range(DEPTH)
    ]


@pytest.mark.slow
def test_optimizer_states_of_all_that_may_run_are_there_while_it_is_measured() -> None:
    work = drawing("experts")
    profile = planner.profile(work, menus=False)
    states = sum(2 * p.numel() * 4 + 4 for p in work.model.parameters())
    assert profile.resident.optimizer == states
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
@pytest.mark.parametrize("seed", range(3))
def test_a_loop_that_draws_its_task_before_the_forward_is_profiled_with_the_larger_one(
    draw: Callable[[], str], seed: int
) -> None:
    seed_all(seed)
    model, x = Tasks(), torch.randn(64, 16)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        task = draw()
        optimizer.zero_grad()
        model(x, task).square().mean().backward()
        optimizer.step()

    profile = planner.profile(Workload(model=model, step=step, optimizer=optimizer), menus=False)
    stages = [stage for stage in profile.stages if stage.kind == "stage"]
    assert len(stages) == 9
    assert {stage.reason for stage in stages} == {""}


def test_what_torch_reads_in_the_line_that_reads_a_drawn_number_is_no_drawn_number() -> None:
    seed_all(0)
    model, x = Tasks(), torch.randn(64, 16)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:  # Adam reads how many steps there were; at 0 it would divide by zero.
        # fmt: off
        optimizer.zero_grad(); model(x, "ab"[int(torch.randint(0, 2, ()))]).sum().backward(); optimizer.step()  # noqa: E702
        # fmt: on

    for seed in range(4):
        torch.manual_seed(seed)
        profile = planner.profile(Workload(model=model, step=step, optimizer=optimizer), menus=False)
        assert sum(stage.kind == "stage" for stage in profile.stages) == 9


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
