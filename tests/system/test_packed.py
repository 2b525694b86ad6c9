"""Options that hold masks as bits, carried out on models that draw and compare: exact, and in the bytes predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.plans.cost_model import chain_of
from solvers import Action, Schedule
from solvers.chain import baselines
from tests.support.exactness import assert_same, following, profile_of_opaque, state_after
from tests.support.step_peaks import peaks_of_steps

WIDTH, ROWS = 32, 512


class Dropping(nn.Module):
    """A block with two dropouts, whose masks are floats on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.2, self.training)
        return x + nn.functional.dropout(self.down(inner), 0.1, self.training)


class Comparing(nn.Module):
    """Keeps where of values between bounds, and fills others: its masks are booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        kept = torch.where((y > -0.5).logical_and(y < 0.5), y.sin(), 2 * y)
        return x + kept.masked_fill(kept.isnan() | (kept >= 1), 0.0)


class DrawingPaths(nn.Module):
    """Stochastic depth for each row, with an image's layout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = x.view(-1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
        drawn = nn.functional.dropout(self.conv(image).relu(), 0.5, self.training)
        path = x.new_empty(len(x), 1).bernoulli_(0.8)
        return x + path * drawn.reshape(x.shape)


def built(block: Callable[[], nn.Module], autocast: torch.dtype | None = None) -> planner.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return planner.Workload(
        model=model,
        inputs=torch.randn(ROWS, WIDTH),
        loss=lambda y: y.square().mean(),
        optimizer=optimizer,
        autocast=autocast,
    )


def with_option(base: Schedule, options: dict[int, int], *, again: bool) -> Schedule:
    """A schedule that keeps everything, but for some stages: their options from the forward, or from a second run."""
    actions: list[Action] = []
    for action in base.actions:
        option = options.get(action.stage)
        if option is None or action.kind not in ("forward", "backward"):
            actions.append(action)
        elif action.kind == "forward":
            actions.append(replace(action, option=None if again else option))
        else:
            actions += [*([Action("recompute", action.stage, option)] if again else []), action]
    return Schedule(tuple(actions))


@pytest.mark.parametrize("block", [Dropping, Comparing, DrawingPaths])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_options_with_bits_are_exact_and_take_the_bytes_predicted(
    block: Callable[[], nn.Module], autocast: torch.dtype | None
) -> None:
    profile = profile_of_opaque(built(block, autocast), stages=["*"])
    chain = chain_of(profile)
    keeping = baselines.keep_all(chain)[0]
    expected = state_after(built(block, autocast))
    packed = 0
    stage_of_menu = {record.menu: k for k, record in enumerate(profile.stages) if record.menu >= 0}
    for menu, k in stage_of_menu.items():
        for number, option in enumerate(profile.menus[menu].options, start=1):
            if not option.packed:
                continue
            packed += 1
            for again in (False, True):
                plan = following(profile, with_option(keeping, {k: number}, again=again))
                work = built(block, autocast)
                with planner.apply(work.model, plan):
                    assert_same(state_after(work), expected)
                assert max(peaks_of_steps(built(block, autocast), plan, 1)) <= plan.predicted_peak_bytes
    assert packed >= 4


def test_plans_that_draw_again_and_that_unpack_are_not_the_same() -> None:
    profile = profile_of_opaque(built(Dropping), stages=["*"])
    chain = chain_of(profile)
    menu = profile.menus[profile.stages[1].menu]
    number = next(n for n, option in enumerate(menu.options, start=1) if option.packed)
    plan = following(profile, with_option(baselines.keep_all(chain)[0], {1: number}, again=False))
    option = menu.options[number - 1]
    drawing = replace(menu, options=(*menu.options[: number - 1], replace(option, packed=()), *menu.options[number:]))
    menus = tuple(drawing if each == menu else each for each in plan.menus)
    assert replace(plan, menus=menus).fingerprint != plan.fingerprint
    assert plan.recomputed_ops == len(option.rerun) - len(option.packed)
    reloaded = planner.Plan.from_document(json.loads(json.dumps(plan.to_document())), "a file")
    assert reloaded.menus == plan.menus and reloaded.fingerprint == plan.fingerprint
