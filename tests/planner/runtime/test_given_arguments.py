"""Arguments of other kinds: what is taken, and the words for what is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from profiler.workload.workload import Workload
from tests.support.odd_models import workload


@pytest.fixture(scope="module")
def planned() -> tuple[Workload, planner.Profile, planner.Plan]:
    work = workload("plain")
    profile = planner.profile(work, menus=False)
    return work, profile, planner.solve(profile, "100%", solver="rotor")


@pytest.mark.parametrize("kind", [str, Path])
def test_apply_takes_the_path_of_a_plan(
    planned: tuple[Workload, planner.Profile, planner.Plan], tmp_path: Path, kind: Callable[[Path], Any]
) -> None:
    work, _, plan = planned
    plan.save(tmp_path / "plan.json")
    with planner.apply(work.model, kind(tmp_path / "plan.json")) as handle:
        assert handle.plan == plan


def test_apply_says_what_to_pass_instead(
    planned: tuple[Workload, planner.Profile, planner.Plan], tmp_path: Path
) -> None:
    work, profile, plan = planned
    profile.save(tmp_path / "profile.json")
    with planner.apply(work.model, plan) as handle:
        pass
    wrong: list[tuple[Any, Any, str]] = [
        (work.model, profile, r"a Profile is neither .*; solve it first: plan = planner.solve\(profile, budget="),
        (work.model, tmp_path / "profile.json", "got 'planner-profile': a profile, which planner profile writes"),
        (work.model, work, r"a Workload is neither .*; profile and solve first"),
        (work.model, handle, "a Handle is neither .*; pass its plan attribute"),
        (work.model, None, "None is neither .*; pass what planner.solve returned"),
        (plan, work.model, "a Plan, not a torch.nn.Module; call planner.apply.model, plan., the model first"),
        (work, plan, "a Workload, not a torch.nn.Module; pass workload.model"),
        (nn.Sequential(nn.LazyLinear(4)), plan, r"that have not run \(0.weight, 0.bias\); run one forward"),
    ]
    for model, given, words in wrong:
        with pytest.raises(ValueError, match=words):
            planner.apply(model, given)


def test_planning_says_what_to_pass_instead(planned: tuple[Workload, planner.Profile, planner.Plan]) -> None:
    work, _, plan = planned
    calls: list[Callable[[Any], Any]] = [
        lambda given: planner.solve(given, "80%"),
        lambda given: planner.state(given, []),
        planner.pareto,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"a Workload .*; profile it first: .*planner.profile\(workload"):
            call(work)
        with pytest.raises(ValueError, match=r"a Stack is neither .*; profile its step first"):
            call(work.model)
        with pytest.raises(ValueError, match="a Plan is neither .*; pass the profile that it was made from"):
            call(plan)
    for measured in (planner.profile, planner.measure):
        with pytest.raises(ValueError, match=r"expected a planner.Workload, got a Stack; say what a step is first"):
            measured(work.model)  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [planner.profile, planner.measure, planner.model_states])
def test_models_that_cannot_run_yet_are_refused_before_anything_changes(run: Callable[[Workload], Any]) -> None:
    batch = torch.randn(2, 4)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"lazy modules that have not run \(0.weight, 0.bias, 1.weight and 3 more\)"):
        run(Workload(model=lazy, inputs=batch, loss=torch.sum))
    assert isinstance(lazy[0], nn.LazyLinear)
    with torch.device("meta"):
        meta = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"on the meta device \(weight, bias\), .*allocate it: model.to_empty"):
        run(Workload(model=meta, inputs=batch, loss=torch.sum))
    with pytest.raises(ValueError, match="allocate it"):
        Workload(model=meta, inputs=batch, loss=torch.sum).to("cpu")


def test_a_precision_that_names_no_type_is_refused(
    planned: tuple[Workload, planner.Profile, planner.Plan],
) -> None:
    work, _, plan = planned
    spoilt = dataclasses.replace(plan, precision=f"{plan.precision}, autocast load")
    with pytest.raises(ValueError, match="a type of torch's after autocast, got 'load'"):
        planner.apply(work.model, spoilt)
    planner.apply(work.model, plan).remove()
