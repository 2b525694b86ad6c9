"""Step marks: the places of a step in order, with and without a plan, and the allocator's bytes undisturbed."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.plans.lowering import lower_schedule
from planner.runtime.applier import split_name
from profiler.measurement.meter import memory_meter
from profiler.measurement.planned_probe import AGAIN, StepMarks
from profiler.workload.snapshot import preserved
from profiler.workload.steps import first_step, resident_bytes_of
from profiler.workload.workload import Workload
from tests.support.odd_models import WIDTH, Stack, workload


def smallest_plan(work: Workload, **options) -> planner.Plan:
    profile = planner.profile(work, menus=False, **options)
    try:
        return planner.solve(profile, 1)
    except planner.Infeasible as refusal:
        return planner.solve(profile, refusal.minimum_budget_bytes)


def marks_of(work: Workload, plan: planner.Plan) -> StepMarks:
    places = {k: i for i, k in enumerate(k for k, stage in enumerate(plan.stages) if stage.kind == "stage")}
    reruns = lower_schedule(plan.stages, plan.schedule).reruns
    again = {places[k]: [places[rerun.stage] for rerun in found] for k, found in reruns.items() if k in places}
    return StepMarks(work, [split_name(plan.stages[k].name) for k in places], again)


def labels_of(work: Workload, plan: planner.Plan, planned: bool) -> tuple[list[str], int]:
    """The labels of one step, neighbours that are equal once, and its peak."""
    with preserved(work):
        first_step(work)
        resident = resident_bytes_of(work).total
        with marks_of(work, plan) as marks, planner.apply(work.model, plan) if planned else nullcontext():
            intervals = marks.step(memory_meter(work.device, resident))
    found = [interval.label for interval in intervals]
    once = [label for k, label in enumerate(found) if k == 0 or label != found[k - 1]]
    return once, max(interval.peak_bytes for interval in intervals)


def test_an_unplanned_step_goes_through_every_stage_forth_and_back() -> None:
    work = workload("sequential")
    plan = smallest_plan(work)
    labels, _ = labels_of(work, plan, planned=False)
    stages = sum(stage.kind == "stage" for stage in plan.stages)
    forward = [label for label in labels if label.startswith("forward:stage")]
    backward = [label for label in labels if label.startswith("backward:stage")]
    assert forward == [f"forward:stage:{k}" for k in range(stages)]
    assert backward == [f"backward:stage:{k}" for k in reversed(range(stages))]
    assert labels[-2:] == ["optimizer", "end"]
    assert not any(label.startswith(AGAIN) for label in labels)


def test_a_planned_step_marks_every_second_run() -> None:
    work = workload("sequential")
    plan = smallest_plan(work)
    labels, _ = labels_of(work, plan, planned=True)
    again = [label for label in labels if label.startswith(AGAIN)]
    assert len(again) == sum(stage.runs - 1 for stage in plan.stages) > 0
    after = [labels[k + 1] for k, label in enumerate(labels) if label.startswith(AGAIN)]
    assert all(label.startswith("backward:") for label in after)


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
    labels, _ = labels_of(work, plan, planned=True)
    places = [k for k, stage in enumerate(plan.stages) if stage.kind == "stage"]
    runs = [sum(label == f"{AGAIN}:stage:{i}" for label in labels) for i in range(4)]
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
        labels, peak = labels_of(work, plan, planned=True)
    assert peak == plan.predicted_peak_bytes
    assert not any(label.startswith(AGAIN) for label in labels)


@pytest.mark.parametrize("name", ["skip", "frozen"])
def test_marks_change_neither_the_peak_nor_the_model(name: str) -> None:
    work = workload(name)
    plan = smallest_plan(work)
    for planned in (False, True):
        _, peak = labels_of(work, plan, planned)
        with planner.apply(work.model, plan) if planned else nullcontext():
            assert peak == planner.measure(work, repeats=1).peak_bytes
    assert all("forward" not in module.__dict__ for module in work.model.modules())
