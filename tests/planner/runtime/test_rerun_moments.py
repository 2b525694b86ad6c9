"""Stages run again when the schedule says, or the plan is refused: late runs would stand beside later gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.plans.lowering import UnsupportedPlan
from solvers import Action, Schedule, replay

SAMPLES = 64
RUNS = ("forward", "recompute")
ran: list[int] = []  # blocks, in order; what a block holds itself is as before after a second run


class Block(nn.Module):
    """Notes its runs. ``copies`` of its input are alive for a moment, which keeping it does not need."""

    def __init__(self, number: int, inputs: int, hidden: int, outputs: int, copies: int = 0) -> None:
        super().__init__()
        self.number, self.copies = number, copies
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        ran.append(self.number)
        y = self.down(torch.tanh(self.up(x)))
        return y + x.repeat(1, self.copies).mean() if self.copies else y


def four_blocks() -> planner.Workload:
    """The first one needs much to run and little to be kept; the last one has large gradients of its parameters."""
    torch.manual_seed(0)
    sizes = [(32, 64, 64, 2048), (64, 128, 16), (16, 128, 16), (16, 8192, 512)]
    model = nn.Sequential(*[Block(number, *size) for number, size in enumerate(sizes)])
    inputs = torch.randn(SAMPLES, 32)
    return planner.Workload(model=model, inputs=inputs, loss=lambda output: output.square().mean())


def scheduled(plan: planner.Plan, *rows: tuple) -> planner.Plan:
    """The plan with this schedule of blocks, inside of what stands before and after them."""
    last = len(plan.stages) - 1
    forward = next(i for i, row in enumerate(rows) if row == ("loss",))
    actions = [Action("forward", 0, 0)]
    for kind, block, *option in rows[:forward]:
        actions.append(Action(kind, block + 1, *option))
    actions += [Action("forward", last, 0), Action("free", last), Action("backward", last)]
    for kind, block, *option in rows[forward + 1 :]:
        actions.append(Action(kind, block + 1, *option))
    schedule = Schedule((*actions, Action("free", 0), Action("backward", 0)))
    result = replay(plan.chain, schedule)  # type: ignore[arg-type]
    return dataclasses.replace(plan, schedule=schedule, predicted_peak_bytes=result.peak_bytes)


def again(block: int) -> list[tuple]:
    return [("free", block), ("recompute", block, 0), ("backward", block)]


@pytest.mark.slow
def test_runs_before_a_kept_backward_are_refused() -> None:
    """At its end the first blocks would run beside the last one's gradients: 52 MB measured where 41 are predicted."""
    work = four_blocks()
    plan = planner.solve(planner.profile(work, stages=["0", "1", "2", "3"]), "100%")
    dropped = [("forward", 0), ("forward", 1), ("free", 0), ("forward", 2), ("free", 1)]
    early = [("free", 3), ("forward", 0), ("forward", 1), ("backward", 3)]
    late = [*again(2), *again(1), *again(0)]
    spoilt = scheduled(plan, *dropped, ("forward", 3, 0), ("loss",), *early, *late)
    with pytest.raises(UnsupportedPlan, match="'0' is recomputed .*before the backward of stage '3'.; solve again"):
        planner.apply(work.model, spoilt)


@pytest.mark.slow
def test_what_no_run_reads_at_once_is_refused() -> None:
    """The first block's output, made again before the last backward for the next phase, would be made once more."""
    work = four_blocks()
    plan = planner.solve(planner.profile(work, stages=["0", "1", "2", "3"]), "100%")
    dropped = [("forward", 0), ("forward", 1), ("free", 0), ("forward", 2), ("forward", 3)]
    early = [("free", 3), ("forward", 0), ("recompute", 3, 0), ("backward", 3), ("free", 2), ("forward", 1)]
    late = [("recompute", 2, 0), ("backward", 2), *again(1), *again(0)]
    spoilt = scheduled(plan, *dropped, ("loss",), *early, *late)
    with pytest.raises(UnsupportedPlan, match="'1' is not recomputed directly after the stage before it"):
        planner.apply(work.model, spoilt)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["ilp", "auto"])
def test_solved_plans_run_what_they_say_in_the_order_they_say(solver: str) -> None:
    work = four_blocks()
    profile = planner.profile(work, stages=["0", "1", "2", "3"])
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(profile, 1)
    low, high = refusal.value.minimum_budget_bytes, profile.unplanned_peak_bytes
    for budget in {low, (3 * low + high) // 4, (low + high) // 2}:
        plan = planner.solve(profile, budget, solver=solver, time_limit_seconds=2.0)
        blocks = range(1, 5)
        planned = [a.stage - 1 for a in plan.schedule.actions if a.kind in RUNS and a.stage in blocks]
        with planner.apply(work.model, plan):
            ran.clear()
            work.step()
            assert ran == planned
            assert planner.measure(work, repeats=1).peak_bytes <= plan.predicted_peak_bytes
