"""Outputs that others hold while the stage that made them runs again: there is one of each, and not two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.explain.measured_step import view_step
from planner.explain.timeline import Timeline, predicted_timelines
from planner.plans.plan import chain_in
from planner.runtime.dropped_stage import SharedOutputs
from planner.zoo import build


def began(timeline: Timeline) -> dict[str, int]:
    """Bytes as each stage on the way down runs again."""
    down = ("down", "pool", "mid")
    return {s.stage: s.before_bytes for s in timeline.spans if s.action == "recompute" and s.stage.startswith(down)}


@pytest.mark.slow
def test_a_skip_connection_is_there_once_while_its_maker_runs_again() -> None:
    work = build("unet", image=48, hidden=8, batch=4)
    profile = planner.profile(work, menus=False)
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1, solver="chen_greedy")
    plan = planner.solve(profile, refused.value.minimum_budget_bytes, solver="chen_greedy")
    view = view_step(work, plan, rounds=1)
    _, predicted = predicted_timelines(chain_in(plan), plan.schedule)
    assert "pool#2" in began(predicted)
    assert began(view.planned) == began(predicted)


def test_what_was_made_again_lies_in_the_memory_of_what_is_there() -> None:
    first = torch.arange(6.0).view(2, 3)
    outputs, again = SharedOutputs([first]), first.clone()
    saved, part, other = again.detach(), again[0], torch.ones(2)
    outputs.take_the_place_of([again], [again, saved, part, other])
    for tensor in (again, saved, part):
        assert tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert torch.equal(again, first) and torch.equal(part, first[0]) and torch.equal(other, torch.ones(2))


def changed(first: Tensor) -> Tensor:
    first[0].add_(1)
    return first.clone()


@pytest.mark.parametrize(
    "remade",
    [
        changed,
        lambda first: first.clone().t().contiguous().t(),  # It lies otherwise.
        lambda first: torch.cat([first, first])[:2],  # In more memory.
        lambda first: first.double(),
        lambda first: nn.Parameter(first.clone()),
    ],
)
def test_what_is_not_the_same_stays_where_it_is(remade: Callable[[Tensor], Tensor]) -> None:
    first = torch.arange(6.0).view(2, 3)
    outputs, again = SharedOutputs([first]), remade(first)
    where = again.untyped_storage().data_ptr()
    outputs.take_the_place_of([again], [again])
    assert again.untyped_storage().data_ptr() == where


def test_nothing_is_held_and_the_latest_run_counts() -> None:
    first: Any = torch.arange(6.0)
    outputs, second = SharedOutputs([first]), first.clone()
    del first
    outputs.take_the_place_of([second], [second])
    third = second.clone()
    outputs.take_the_place_of([third], [third])
    assert third.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
