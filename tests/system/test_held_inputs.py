"""Predictions count the input of a stage that a plan holds, though the unplanned step may have let go of it by then."""

from __future__ import annotations

import functools
import itertools
import random
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
from solvers.chain.baselines import Segment, segmented_schedule
from tests.support.exactness import following
from tests.support.step_peaks import peaks_of_steps

WIDTH, BATCH = 32, 256
MOST_PLANS = 27


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


class Squashed(nn.Module):
    """Autograd saves nothing of what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(sum(more, x) + self.shift))


class LetGo(nn.Module):
    """What its stages read goes before the peak of what runs outside behind them, or (``late``) after it."""

    def __init__(self, read_twice: bool, has_gradient: bool, late: bool) -> None:
        super().__init__()
        self.read_twice, self.has_gradient, self.late = read_twice, has_gradient, late
        self.first, self.second, self.third = (Squashed() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        read = self.first(x) + 1
        x = self.second(read)
        x = self.third(x, read) if self.read_twice else self.third(x)
        if not self.late:
            del read
        with torch.no_grad():
            factor = torch.zeros(BATCH, 10 * WIDTH).add_(1).mean()
        if self.has_gradient:
            x = x * x + torch.zeros(BATCH, 3 * WIDTH).sum()
        return self.last(x) * factor


class NarrowAndWide(nn.Module):
    """Its backward lets go of its first input before it makes the gradient of what is wide, in forward a view."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, WIDTH)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        wide = second.square().unsqueeze(1).expand(-1, 16, -1)
        return wide[:, 0] + self.narrow(first)


class LetGoInBackward(nn.Module):
    """The input of ``second`` is saved by ``third`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.third = Squashed(), NarrowAndWide()

    def forward(self, x: Tensor) -> Tensor:
        read = self.first(x)
        return self.last(self.third(read, self.second(read)))


class Added(nn.Module):
    """Autograd saves nothing of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = Waves()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.waves(x)


class Watched(nn.Module):
    """Its forward takes more than its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        with torch.no_grad():
            y.repeat(1, 9).sum()
        return torch.tanh(y)


class CastInBetween(nn.Module):
    """One stage runs in bfloat16; nobody saves what it returns but itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(WIDTH, WIDTH), Added(), Watched()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        with torch.autocast("cpu", torch.bfloat16):
            x = self.third(x)
        return self.head(x.float())


def differing(work: planner.Workload, menus: bool) -> dict[tuple[int | None, ...], int]:
    """Measured less predicted bytes of every plan that drops stages or gives them an option, where they differ.

    Stages that are dropped one after the other run again together. A ``head`` is none. Of more than ``MOST_PLANS``
    plans a seeded sample is measured.
    """
    stages = [name for name, _ in work.model.named_children() if name != "head"]
    profile = planner.profile(work, stages=stages, menus=menus)
    chain = chain_of(profile)
    choices = [
        [0] if record.kind == "outside" else list(dict.fromkeys([None, 0, len(stage.options) - 1]))
        for record, stage in zip(profile.stages, chain.stages, strict=True)
    ]
    found = {}
    plans = [*itertools.product(*choices)]
    for choice in plans if len(plans) <= MOST_PLANS else random.Random(0).sample(plans, MOST_PLANS):
        spans: list[Segment] = []
        for k, option in enumerate(choice):
            if option is None and spans and not spans[-1].kept and chain.stages[k].linked:
                spans[-1] = Segment(spans[-1].start, k + 1)
            else:
                spans.append(Segment(k, k + 1, option))
        plan = following(profile, segmented_schedule(spans))
        found[choice] = max(peaks_of_steps(work, plan, 1)) - plan.predicted_peak_bytes
    return {choice: size_bytes for choice, size_bytes in found.items() if size_bytes}


MODELS = {
    "in backward": LetGoInBackward,
    "cast": CastInBetween,
    **{str(kind): functools.partial(LetGo, *kind) for kind in itertools.product([False, True], repeat=3)},
}


# Every pair of properties with each of their values, in half of the models.
HALF = [name for name in MODELS if name.count("True") % 2 == 0]


@pytest.mark.parametrize(
    ("menus", "name"),
    [*((False, name) for name in MODELS), *(pytest.param(True, name, marks=pytest.mark.nightly) for name in HALF)],
)
def test_no_plan_needs_more_where_the_unplanned_step_lets_go_of_inputs_before_a_peak(menus: bool, name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name](), torch.randn(BATCH, WIDTH)
    work = planner.Workload(model=model, inputs=inputs, loss=lambda output: output.square().sum())
    assert max(differing(work, menus).values(), default=0) <= 0
