"""Second runs are compared with the first ones in all stages at first, and in turns later: a lasting fault is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.runtime.plan_checks import CheckTurns
from profiler.recomputation.saved_tensors import RerunError

STAGES = 4
SCALE = [1.0]


class Scaled(nn.Module):
    """Depends on a global, which no module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * SCALE[0]).tanh()


def all_dropped() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Scaled() for _ in range(STAGES))), torch.rand(4, 8)
    work = planner.Workload(model=model, inputs=x, loss=lambda output: output.sum())
    names = [str(k) for k in range(STAGES)]
    planner.apply(model, planner.state(planner.profile(work, stages=names, menus=False), planner.Rule(modules="*")))
    return model, x


def step(model: nn.Module, x: Tensor, *, faulty: bool) -> None:
    loss = model(x).sum()
    SCALE[0] = 2.0 if faulty else 1.0
    try:
        loss.backward()
    finally:
        SCALE[0] = 1.0


@pytest.mark.parametrize("before", range(CheckTurns.ALL_FORWARDS + 2 * STAGES))
@pytest.mark.slow
def test_a_lasting_fault_is_found_within_as_many_steps_as_there_are_stages(before: int) -> None:
    model, x = all_dropped()
    for _ in range(before):
        step(model, x, faulty=False)
    with pytest.raises(RerunError, match="other values"):
        for _ in range(STAGES):
            step(model, x, faulty=True)


def test_a_forward_on_a_batch_of_another_shape_is_checked_at_once() -> None:
    model, x = all_dropped()
    for _ in range(2 * CheckTurns.ALL_FORWARDS):
        step(model, x, faulty=False)
    for _ in range(2):
        with pytest.raises(RerunError, match="stage '3'"):
            step(model, x[:2], faulty=True)


def test_one_stage_is_looked_at_in_each_forward_after_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    original = CheckTurns.checked
    monkeypatch.setattr(
        CheckTurns, "checked", lambda turns, k: (looked.append((k, original(turns, k))), original(turns, k))[1]
    )
    model, x = all_dropped()
    for _ in range(CheckTurns.ALL_FORWARDS):
        step(model, x, faulty=False)
    assert len(looked) == CheckTurns.ALL_FORWARDS * STAGES and all(checked for _, checked in looked)
    looked.clear()
    for _ in range(STAGES):
        step(model, x, faulty=False)
    assert len({k for k, checked in looked if checked}) == sum(checked for _, checked in looked) == STAGES
