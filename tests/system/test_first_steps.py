"""The first planned step, in which the optimizer makes its states, keeps the budget as every later one does."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import planner
from profiler.measurement.meter import memory_meter, metered
from profiler.workload.steps import resident_bytes_of
from tests.support.exactness import budgets

LATER_STEPS = 2
# Width and batch: where weights, gradients and states are most of the peak, and where activations are.
SIZES = {"weights": (96, 8), "activations": (16, 256)}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, weight_decay=0.1, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


def fresh(optimizer: str, foreach: bool, size: str, precision: str = "float32") -> planner.Workload:
    """Four blocks, and an optimizer that has no states yet."""
    width, batch = SIZES[size]
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)]
    model, inputs = nn.Sequential(*blocks), torch.randn(batch, width)
    if precision == "bfloat16":
        model, inputs = model.bfloat16(), inputs.bfloat16()
    return planner.Workload(
        model=model,
        inputs=inputs,
        loss=lambda output: output.float().square().mean(),
        optimizer=OPTIMIZERS[optimizer](model.parameters(), foreach=foreach),
        autocast=torch.float16 if precision == "autocast" else None,
        scaler=torch.amp.GradScaler("cpu", init_scale=256.0) if precision == "autocast" else None,
    )


def peak_of_step(work: planner.Workload) -> int:
    """Most bytes alive at once in the next step, everything that it makes included."""
    work.zero_grad()
    gc.collect()
    meter = memory_meter(work.device, resident_bytes_of(work).total)
    return metered(meter, work.step).peak_bytes


CASES = [(optimizer, foreach, "weights") for optimizer in OPTIMIZERS for foreach in (False, True)]


@pytest.mark.parametrize(
    ("optimizer", "foreach", "size"),
    [*CASES, ("momentum", False, "activations"), ("adamw", True, "activations")],
)
def test_the_first_step_keeps_the_budget_and_later_ones_take_what_was_predicted(
    optimizer: str, foreach: bool, size: str
) -> None:
    check_steps(lambda: fresh(optimizer, foreach, size))


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("momentum", "autocast"), ("adafactor", "autocast"), ("adamw", "bfloat16")]
)
def test_the_same_in_half_precision(optimizer: str, precision: str) -> None:
    check_steps(lambda: fresh(optimizer, True, "weights", precision))


def check_steps(build: Callable[[], planner.Workload]) -> None:
    profile = planner.profile(build(), menus=False)
    smallest, middle, _ = budgets(profile)
    for budget in (smallest, middle, profile.unplanned_peak_bytes):
        plan = planner.solve(profile, budget, solver="rotor")
        work = build()
        assert work.optimizer is not None and not work.optimizer.state
        with planner.apply(work.model, plan):
            first, *later = [peak_of_step(work) for _ in range(1 + LATER_STEPS)]
        assert first <= plan.predicted_peak_bytes <= budget
        assert later == [plan.predicted_peak_bytes] * LATER_STEPS
