"""Plans of single ops that send values to host memory: the laws that such plans keep, on profiles by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.plans.offload_request import Offload
from profiler.graph_profile import GraphProfile
from profiler.records import LinkRecord
from profiler.step_replay import StepCopy
from tests.support.step_profiles import KIB, chain_step, profile_of

SIZE = 100 * KIB
PROFILE = profile_of(chain_step(layers=8))
PEAK = PROFILE.unplanned_peak_bytes  # ten storages; eight seconds forward, sixteen back
BUDGETS = [PEAK - 2 * SIZE, PEAK - 4 * SIZE, PEAK - 5 * SIZE]


def over(seconds: float, **more: Any) -> GraphProfile:
    """With a link over which each storage takes so long, each way."""
    rate = SIZE / seconds if seconds else math.inf
    link = LinkRecord(to_host_bytes_per_second=rate, to_device_bytes_per_second=rate, **more)
    return replace(PROFILE, link=link)


def solved(profile: GraphProfile, budget_bytes: int, **more: Any) -> planner.GraphPlan:
    return planner.solve(profile, budget_bytes, time_limit_seconds=1, **more)


def least_bytes(profile: GraphProfile, **more: Any) -> int:
    with pytest.raises((planner.Infeasible, planner.NothingFound)) as refused:
        solved(profile, 1, **more)
    return refused.value.minimum_budget_bytes


@pytest.mark.parametrize("budget_bytes", BUDGETS)
@pytest.mark.parametrize("seconds", [0.0, 0.5, 2.0, 20.0])
def test_never_slower_than_without_and_within_the_budget(seconds: float, budget_bytes: int) -> None:
    without, with_link = (solved(over(seconds), budget_bytes, offload=mode) for mode in ("never", "auto"))
    assert with_link.predicted_seconds <= without.predicted_seconds
    assert with_link.predicted_peak_bytes <= budget_bytes
    assert with_link.lower_bound_seconds == PROFILE.once_seconds <= with_link.predicted_seconds
    assert not without.copies and without.link is None


@pytest.mark.parametrize("budget_bytes", BUDGETS)
def test_over_a_fast_link_nothing_runs_again_and_over_none_all_is_as_without(budget_bytes: int) -> None:
    fast = solved(over(0.0), budget_bytes)
    assert fast.copies and fast.predicted_seconds == PROFILE.once_seconds and fast.status == "optimal"
    none = solved(over(math.inf), budget_bytes)
    assert not none.copies and none.link is None and "the link's speed is 0" in none.no_offload
    assert none.predicted_seconds == solved(PROFILE, budget_bytes, offload="never").predicted_seconds


def test_a_faster_link_is_never_slower() -> None:
    seconds = [solved(over(each), BUDGETS[1]).predicted_seconds for each in (20.0, 4.0, 2.0, 1.0, 0.5, 0.0)]
    assert seconds == sorted(seconds, reverse=True)


def test_what_can_be_reached_without_can_be_reached_with() -> None:
    budget_bytes = least_bytes(PROFILE)
    assert solved(over(20.0), budget_bytes).predicted_peak_bytes <= budget_bytes
    assert least_bytes(over(20.0)) <= budget_bytes


def test_offload_alone_recomputes_nothing_and_is_refused_without_a_link() -> None:
    plan = solved(over(1.0), BUDGETS[1], offload="only")
    assert plan.copies and plan.recomputed_ops == 0 and plan.offload_only
    with pytest.raises(ValueError, match="expected a link"):
        solved(PROFILE, BUDGETS[1], offload="only")


def test_the_host_s_limit_is_kept_and_what_is_given_overrules_what_was_measured() -> None:
    plan = solved(over(0.1), BUDGETS[1], offload=Offload(host_memory=2 * SIZE))
    assert plan.host_bytes <= 2 * SIZE
    given = solved(over(0.1), BUDGETS[1], offload=Offload(link_gbps=1.0, devices_per_link=4))
    assert given.link is not None and given.link.to_host_bytes_per_second == 1e9 / 4
    small = solved(over(0.1), BUDGETS[1], offload=Offload(host_memory=SIZE - 1))
    assert "holds not even the smallest" in small.no_offload


def test_only_what_comes_back_is_sent_and_once() -> None:
    plan = solved(over(0.5), BUDGETS[2])
    kinds = {kind: [copy.storage for copy in plan.copies if copy.kind == kind] for kind in ("send", "release", "fetch")}
    assert kinds["send"] == sorted(set(kinds["send"])) and set(kinds["fetch"]) == set(kinds["send"])
    assert sorted(kinds["release"]) == kinds["send"]
    assert plan.host_bytes == SIZE * len(kinds["send"])


def test_a_step_of_several_micro_batches_waits_in_each() -> None:
    once, thrice = (solved(replace(over(6.0), evaluations=count), BUDGETS[2], offload="only") for count in (1, 3))
    assert once.stall_seconds > 0 and thrice.stall_seconds == pytest.approx(3 * once.stall_seconds)


def test_a_plan_with_copies_is_a_file(tmp_path: Path) -> None:
    plan = solved(over(0.0), BUDGETS[1])
    plan.save(tmp_path / "plan.json")
    assert planner.GraphPlan.load(tmp_path / "plan.json") == plan
    beyond = replace(plan, copies=(StepCopy(kind="fetch", storage=0, side="backward", before=99),))
    beyond.save(tmp_path / "beyond.json")
    with pytest.raises(ValueError, match="expected copies of its own storages"):
        planner.GraphPlan.load(tmp_path / "beyond.json")
