"""The marks of a step come in order, with and without a plan, and leave the allocator's bytes as they are."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.plans.lowering import lower_schedule
from planner.runtime.applier import split_name
from profiler.measurement.meter import Mark, Place, step_memory_meter
from profiler.measurement.planned_probe import PlannedProbe
from profiler.workload.snapshot import preserved
from profiler.workload.steps import first_step
from profiler.workload.workload import Workload
from tests.support.odd_models import workload
from tests.support.small_blocks import WIDTH, Stack


def smallest_plan(work: Workload, **options) -> planner.Plan:
    profile = planner.profile(work, menus=False, **options)
    try:
        return planner.solve(profile, 1)
    except planner.Infeasible as refusal:
        return planner.solve(profile, refusal.minimum_budget_bytes)


def probe_of(work: Workload, plan: planner.Plan) -> PlannedProbe:
    places = {k: i for i, k in enumerate(k for k, stage in enumerate(plan.stages) if stage.kind == "stage")}
    reruns = lower_schedule(plan.stages, plan.schedule).reruns
    again = {places[k]: [places[rerun.stage] for rerun in found] for k, found in reruns.items() if k in places}
    return PlannedProbe(work, [split_name(plan.stages[k].name) for k in places], again)


def marks_of(work: Workload, plan: planner.Plan, planned: bool) -> tuple[list[Mark], int]:
    """The marks of one step, neighbours that are equal once, and its peak."""
    with preserved(work):
        first_step(work)
        with probe_of(work, plan) as probe, planner.apply(work.model, plan) if planned else nullcontext():
            phases = probe.step(step_memory_meter(work))
    marks = [mark for mark, _ in phases]
    once = [mark for k, mark in enumerate(marks) if k == 0 or mark != marks[k - 1]]
    return once, max(phase.peak_bytes for _, phase in phases)


def test_an_unplanned_step_goes_through_every_stage_forth_and_back() -> None:
    work = workload("sequential")
    plan = smallest_plan(work)
    marks, _ = marks_of(work, plan, planned=False)
    stages = sum(stage.kind == "stage" for stage in plan.stages)
    of_stages = [mark for mark in marks if mark.place is not None and mark.place.kind == "stage"]
    assert of_stages == [
        *(Mark("forward", Place("stage", k)) for k in range(stages)),
        *(Mark("backward", Place("stage", k)) for k in reversed(range(stages))),
    ]
    assert marks[-2:] == [Mark("optimizer"), Mark("end")]


@pytest.mark.slow
def test_a_planned_step_marks_every_second_run() -> None:
    work = workload("sequential")
    plan = smallest_plan(work)
    marks, _ = marks_of(work, plan, planned=True)
    after = [marks[k + 1] for k, mark in enumerate(marks) if mark.phase == "again"]
    assert len(after) == sum(stage.runs - 1 for stage in plan.stages) > 0
    assert all(mark.phase == "backward" for mark in after)


class Twice(nn.Module):
    """One block called four times: its calls are stages of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return x


def test_calls_of_one_module_are_told_apart() -> None:
    work = Workload(model=Twice(), inputs=torch.randn(16, 32), loss=lambda y: y.sum())
    plan = smallest_plan(work, stages=["block"])
    marks, _ = marks_of(work, plan, planned=True)
    places = [k for k, stage in enumerate(plan.stages) if stage.kind == "stage"]
    runs = [marks.count(Mark("again", Place("stage", i))) for i in range(4)]
    assert runs == [plan.stages[k].runs - 1 for k in places]
    assert sum(runs) > 0


class Bare(nn.Module):
    """Its ops are its own, not those of modules inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight)


def test_marks_are_no_ops_of_a_stage_of_which_a_part_runs_again() -> None:
    work = Workload(model=Stack([Bare() for _ in range(3)]), inputs=torch.randn(16, WIDTH), loss=lambda y: y.sum())
    rules = planner.Rules(rules=[planner.Rule(modules="blocks.*", ops="tanh")])
    plan = planner.state(planner.profile(work, stages=["blocks.*"], rules=rules), rules)
    assert [stage.decision for stage in plan.stages].count("selective") == 3
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*other ops")
        marks, peak = marks_of(work, plan, planned=True)
    # Room for the random state of a second run counts, and there is none.
    assert peak <= plan.predicted_peak_bytes <= plan.unplanned_peak_bytes
    assert not any(mark.phase == "again" for mark in marks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["skip", "frozen"])
def test_marks_change_neither_the_peak_nor_the_model(name: str) -> None:
    work = workload(name)
    plan = smallest_plan(work)
    for planned in (False, True):
        _, peak = marks_of(work, plan, planned)
        with planner.apply(work.model, plan) if planned else nullcontext():
            assert peak == planner.measure(work, repeats=1).peak_bytes
    assert all("forward" not in module.__dict__ for module in work.model.modules())
