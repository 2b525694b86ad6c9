"""A budget that the programs at hand do not fit is refused only where none that is searched for fits, and for good only
where none at all can.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import planner
from planner.plans import exact_programs
from planner.plans.solving import replan


def workload() -> planner.Workload:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers)
    return planner.Workload(model=model, inputs=torch.randn(512, 32), loss=lambda y: y.square().mean())


@pytest.fixture(scope="module")
def found() -> planner.Profile:
    return planner.profile(workload(), stages="whole")


@pytest.fixture
def not_found(found: planner.Profile) -> planner.Profile:
    """As a search that had no time leaves it: with the one program that runs each op once."""
    menus = tuple(replace(menu, options=() if menu.once is None else (menu.once,)) for menu in found.menus)
    return replace(found, menus=menus)


@pytest.mark.slow
def test_a_smaller_program_is_searched_for_where_those_at_hand_need_more(not_found: planner.Profile) -> None:
    work = workload()
    plan = planner.solve(not_found, "75%")
    with planner.apply(work.model, plan):
        assert planner.measure(work).peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes


def test_it_is_proven_that_no_plan_fits_only_where_no_program_can(
    found: planner.Profile, not_found: planner.Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planner.solve(found, "75%")
    monkeypatch.setattr(exact_programs, "with_exact_programs", lambda profile, *_: profile)
    largest = planner.solve(not_found, "100%")
    for refuse in (lambda: planner.solve(not_found, "75%"), lambda: replan(largest, plan.budget_bytes)):
        with pytest.raises(planner.Infeasible, match="not proven that none exists") as refusal:
            refuse()
        assert refusal.value.status == "unknown"
        assert 0 < (refusal.value.lower_bound_seconds or 0) <= plan.predicted_seconds
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(not_found, 1)
    assert refusal.value.status == "infeasible"


def test_the_same_holds_beside_other_micro_batches(
    found: planner.Profile, not_found: planner.Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_programs, "with_exact_programs", lambda profile, *_: profile)
    some, few = (replace(each, in_flight=((1, 0),)) for each in (found, not_found))
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(some, 1)
    fitting_bytes = refusal.value.minimum_budget_bytes  # with programs that ``few`` has not
    largest = planner.solve(few, "400%")
    for budget_bytes, status in ((1, "infeasible"), (fitting_bytes, "unknown")):
        with pytest.raises(planner.Infeasible) as refusal:
            planner.solve(few, budget_bytes)
        assert refusal.value.status == status
        with pytest.raises(planner.Infeasible) as refusal:
            replan(largest, budget_bytes)
        assert refusal.value.status == status
