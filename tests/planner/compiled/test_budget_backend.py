"""A backend of torch.compile that plans for a budget: peaks within it, values as without it, what it cannot do said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import planner
from planner.compiled import budget_backend
from planner.compiled.graph_shares import GraphOptions

WIDTH, BATCH = 16, 256


def work_of(batch: int = BATCH) -> planner.Workload:
    torch.manual_seed(0)
    layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(batch, WIDTH)
    return planner.Workload(model=model, inputs=inputs, loss=lambda y: y.square().mean(), optimizer=optimizer)


def compiled(work: planner.Workload, budget: str | int, **more: Any) -> planner.BudgetBackend:
    """The workload's model compiled for a budget."""
    made = planner.backend(budget, time_limit_seconds=2, **more)
    work.model.forward = torch.compile(work.model.forward, backend=made, dynamic=False)
    return made


def trained(work: planner.Workload) -> list[Tensor]:
    torch.manual_seed(1)
    losses = [work.step() for _ in range(2)]
    return [torch.tensor(losses), *work.model.parameters(), torch.get_rng_state()]


def test_the_peak_is_within_the_budget_and_values_are_as_without_it() -> None:
    free = work_of()
    made = compiled(free, "1GiB")
    trained(free)
    assert [plan.recomputed_ops for plan in made.plans] == [0]
    unplanned_bytes = planner.measure(free, repeats=1).peak_bytes
    tight = work_of()
    budget_bytes = int(0.75 * unplanned_bytes)
    made = compiled(tight, budget_bytes)
    assert all(map(torch.equal, trained(tight), trained(work_of())))
    assert made.plans[0].recomputed_ops
    assert planner.measure(tight, repeats=1).peak_bytes <= budget_bytes
    assert made.plans[0].predicted_peak_bytes <= budget_bytes < made.plans[0].once_peak_bytes


def test_what_is_reserved_is_left_to_others_and_other_shapes_get_a_plan_of_their_own() -> None:
    work = work_of()
    made = compiled(work, "1GiB", reserved="1023MiB")
    work.step()
    assert made.plans[0].predicted_peak_bytes > 1023 * 2**20
    work.model(torch.randn(2 * BATCH, WIDTH)).sum().backward()
    assert len(made.plans) == 2
    with torch.no_grad():
        work.model(work.inputs)
    assert len(made.plans) == 2


def test_a_budget_that_nothing_keeps_is_refused() -> None:
    work = work_of()
    compiled(work, "1KiB")
    with pytest.raises(BackendCompilerFailed, match="budget: expected"):
        work.model(work.inputs)


class Halves(nn.Module):
    """Two graphs with layers each, and an op between them."""

    def __init__(self) -> None:
        super().__init__()
        halves = [[layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())] for _ in range(2)]
        self.first, self.then = (nn.Sequential(*half, nn.Dropout(0.2)) for half in halves)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.then(y.cos())


def work_in_halves() -> planner.Workload:
    torch.manual_seed(0)
    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return planner.Workload(
        model=model, inputs=torch.randn(BATCH, WIDTH), loss=lambda y: y.square().mean(), optimizer=optimizer
    )


def trained_in_halves(work: planner.Workload) -> list[Tensor]:
    torch.manual_seed(1)
    losses = [work.step() for _ in range(4)]
    return [torch.tensor(losses), *work.model.parameters(), torch.get_rng_state()]


@pytest.mark.slow
def test_several_graphs_share_one_budget() -> None:
    expected = trained_in_halves(work_in_halves())
    work = work_in_halves()
    made = compiled(work, "1GiB")
    assert all(map(torch.equal, trained_in_halves(work), expected))
    assert [plan.recomputed_ops for plan in made.plans] == [0, 0]  # The first step's order was another one.
    once_bytes = made.plans[0].predicted_peak_bytes
    assert planner.measure(work, repeats=1).peak_bytes <= once_bytes
    torch._dynamo.reset()
    work, budget_bytes = work_in_halves(), int(0.75 * once_bytes)
    made = compiled(work, budget_bytes)
    assert all(map(torch.equal, trained_in_halves(work), expected))
    assert sum(plan.recomputed_ops for plan in made.plans) > 0
    assert planner.measure(work, repeats=1).peak_bytes <= made.plans[0].predicted_peak_bytes <= budget_bytes


@pytest.mark.slow
def test_several_graphs_that_do_not_fit_together_are_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    real = budget_backend.options_of

    def only_the_largest(*args: Any, **more: Any) -> GraphOptions:
        found = real(*args, **more)
        return replace(found, options=found.options[-1:])

    monkeypatch.setattr(budget_backend, "options_of", only_the_largest)
    work = work_in_halves()
    made = compiled(work, "1GiB")
    trained_in_halves(work)
    least_bytes = made.plans[0].predicted_peak_bytes
    torch._dynamo.reset()
    work = work_in_halves()
    compiled(work, least_bytes - 1)
    work.step()
    with pytest.raises(planner.NothingFound, match="the step runs 2 graphs in turn") as refusal:
        work.step()
    assert refusal.value.minimum_budget_bytes == least_bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.wide(x).sin())


def test_a_graph_that_runs_several_times_in_a_step_keeps_as_often() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([Block() for _ in range(4)])
    made = planner.backend("1GiB", time_limit_seconds=2)
    for layer in layers:
        layer.compile(backend=made, dynamic=False)
    inputs = torch.randn(BATCH, WIDTH)
    with torch.no_grad():
        layers[0](inputs)

    def step() -> Tensor:
        y = inputs
        for layer in layers:
            y = layer(y)
        loss = y.square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        step()
    kept_bytes = BATCH * 4 * WIDTH * 4
    assert {plan.recomputed_ops for plan in made.plans} == {0}
    assert made.plans[0].predicted_peak_bytes > len(layers) * kept_bytes


def test_symbols_run_unplanned_and_an_unknown_compiler_is_refused() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.warns(RuntimeWarning, match=r"got symbols: compile with dynamic=False"):
        torch.compile(model, backend=planner.backend("1GiB"), dynamic=True)(torch.randn(4, WIDTH)).sum().backward()
    with pytest.raises(ValueError, match="expected one of"):
        planner.backend("1GiB", compiler="fast")  # type: ignore[arg-type]
