"""Predictions count the input of a stage that an option holds, whoever else holds it in the unplanned step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.explain.measured_step import view_step
from planner.explain.timeline import Timeline, predicted_timelines
from planner.plans.cost_model import chain_of
from solvers import Action, Schedule
from solvers.chain import baselines
from tests.support.exactness import following

WIDTH, BATCH = 32, 256


class Waves(nn.Module):
    """What it saves for backward does not include its input; running its ops again takes the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.exp(torch.tanh(x)).sin().exp()
        return torch.tanh(made * self.scale).exp()


class Held(nn.Module):
    """``forward`` has the first stage's output in a variable until it returns, or lets go of it at once."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.held = held
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Waves() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        beginning = x if self.held else None
        for block in self.blocks:
            x = block(x)
        assert beginning is None or self.held
        return x


def build(held: bool) -> planner.Workload:
    torch.manual_seed(0)
    return planner.Workload(model=Held(held), inputs=torch.randn(BATCH, WIDTH), loss=lambda output: output.sum())


def running_again(base: Schedule, options: dict[int, int]) -> Schedule:
    """The schedule that keeps everything, but for some stages: dropped, and run again with an option each."""
    actions: list[Action] = []
    for action in base.actions:
        if action.stage in options and action.kind == "forward":
            actions.append(Action("forward", action.stage))
        elif action.stage in options and action.kind == "backward":
            actions += [Action("recompute", action.stage, options[action.stage]), action]
        else:
            actions.append(action)
    return Schedule(tuple(actions))


def highest(timeline: Timeline) -> dict[str, int]:
    """The most bytes alive in the backward of each stage."""
    found: dict[str, int] = {}
    for span in timeline.spans:
        if span.phase == span.action == "backward":
            found[span.stage] = max(span.peak_bytes, found.get(span.stage, 0))
    return found


@pytest.mark.parametrize("held", [False, True])
def test_no_option_of_a_second_run_needs_more_than_predicted(held: bool) -> None:
    work = build(held)
    profile = planner.profile(work, stages=["first", "blocks.*"])
    chain = chain_of(profile)
    stages = [k for k, record in enumerate(profile.stages) if record.name.startswith("blocks")]
    assert any(chain.shared) == held and all(len(chain.stages[k].options) > 1 for k in stages)
    for option in range(min(len(chain.stages[k].options) for k in stages)):
        schedule = running_again(baselines.keep_all(chain)[0], dict.fromkeys(stages, option))
        plan = following(profile, schedule)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            measured = highest(view_step(work, plan, rounds=1).planned)
        predicted = highest(predicted_timelines(chain, schedule)[1])
        assert all(predicted[name] >= measured[name] for name in (profile.stages[k].name for k in stages))
