"""What plans of single ops claim of their time holds for the whole budget, and what is not proven is not said to be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NoReturn

import pytest

import planner
from planner.plans import graph_solving
from planner.steps.graph_problem import step_problem
from profiler.records import LinkRecord, Phase
from tests.support.step_profiles import KIB, chain_step, profile_of

PROFILE = profile_of(chain_step(layers=8))
SIZE = 100 * KIB


def beside(phase: Phase) -> Phase:
    """The phase with the bytes of a storage beside it."""
    start, peak, end = (size + SIZE for size in (phase.start_bytes, phase.peak_bytes, phase.end_bytes))
    return replace(phase, start_bytes=start, peak_bytes=peak, end_bytes=end)


def test_an_order_that_is_found_in_less_room_keeps_the_bound_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that counts one storage too few: the first order needs seven of them, and six are to be had."""
    forward, between, backward = map(beside, (PROFILE.forward, PROFILE.between, PROFILE.backward))
    profile = replace(PROFILE, forward=forward, between=between, backward=backward)

    def with_less(*args: Any, **more: Any) -> Any:
        problem = step_problem(*args, **more)
        return replace(problem, graph=replace(problem.graph, resident_bytes=problem.graph.resident_bytes - SIZE))

    wider = planner.solve(profile, 7 * SIZE, time_limit_seconds=2)
    assert planner.solve(profile, 6 * SIZE, time_limit_seconds=2).status == "optimal"
    monkeypatch.setattr(graph_solving, "step_problem", with_less)
    plan = planner.solve(profile, 6 * SIZE, time_limit_seconds=2)
    assert (plan.predicted_seconds, wider.predicted_seconds, plan.status) == (31, 28, "feasible")
    assert plan.lower_bound_seconds == pytest.approx(wider.lower_bound_seconds)
    assert plan.gap == pytest.approx((31 - plan.lower_bound_seconds) / 31)


@pytest.mark.parametrize("proven_with_copies", [True, False])
def test_nothing_is_proven_where_it_is_not_with_copies(
    monkeypatch: pytest.MonkeyPatch, proven_with_copies: bool
) -> None:
    calls = itertools.count()

    def refused(*_: Any) -> NoReturn:
        first = next(calls) == 0
        kind = planner.Infeasible if first or proven_with_copies else planner.NothingFound
        raise kind(minimum_budget_bytes=7 if first else 9, reason="so it is", solver="auto", budget_bytes=5)

    monkeypatch.setattr(graph_solving, "order_within", refused)
    link = LinkRecord(to_host_bytes_per_second=SIZE, to_device_bytes_per_second=SIZE)
    with pytest.raises((planner.Infeasible, planner.NothingFound)) as caught:
        planner.solve(replace(PROFILE, link=link), 5 * SIZE)
    assert next(calls) > 1 and caught.value.minimum_budget_bytes == 7
    assert isinstance(caught.value, planner.Infeasible) == proven_with_copies
