"""A backend of torch.compile that plans for a budget: peaks within it, values as without it, what it cannot do said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import planner

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


class Breaks(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).sin()
        torch._dynamo.graph_break()
        return self.then(y).sin()


def test_a_model_of_several_graphs_runs_unplanned_and_says_so() -> None:
    torch.manual_seed(0)
    model, inputs = Breaks(), torch.randn(4, WIDTH)
    expected = model(inputs)
    made = planner.backend("1GiB")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = torch.compile(model, backend=made)(inputs)
        found.sum().backward()
    ours = [str(each.message) for each in said if "planner.backend" in str(each.message)]
    assert len(ours) == 2 and all("the budget is not promised" in each for each in ours)
    assert torch.equal(found, expected) and not made.plans


def test_symbols_run_unplanned_and_an_unknown_compiler_is_refused() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.warns(RuntimeWarning, match=r"got symbols: compile with dynamic=False"):
        torch.compile(model, backend=planner.backend("1GiB"), dynamic=True)(torch.randn(4, WIDTH)).sum().backward()
    with pytest.raises(ValueError, match="expected one of"):
        planner.backend("1GiB", compiler="fast")  # type: ignore[arg-type]
