"""A measured step: its timelines against the predicted ones and the meter, its peak without a tensor twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import planner
from planner import zoo
from planner.explain.measured_step import MeasuredStep, Places, view_step
from planner.explain.peak import peak_rows
from planner.explain.timeline import Timeline, predicted_timelines
from planner.plans.plan import chain_in
from profiler.measurement.meter import Mark, Place
from profiler.records import Phase
from profiler.workload.workload import Workload
from tests.support.command_line import SMALL

SETTINGS = dict(pair.split("=") for pair in SMALL[1:])


def small_mlp() -> Workload:
    return zoo.build("mlp", **{name: int(value) for name, value in SETTINGS.items()})


@pytest.fixture(scope="module")
def plan(files) -> planner.Plan:
    return planner.Plan.load(files / "plan.json")


@pytest.fixture(scope="module")
def view(plan: planner.Plan) -> MeasuredStep:
    return view_step(small_mlp(), plan, rounds=1)


def test_the_highest_moments_are_those_that_the_meter_measures(plan: planner.Plan, view: MeasuredStep) -> None:
    work = small_mlp()
    assert view.unplanned.peak.peak_bytes == planner.measure(work, repeats=1).peak_bytes
    with planner.apply(work.model, plan):
        measured = planner.measure(work, repeats=1).peak_bytes
    assert view.planned.peak.peak_bytes == view.peak.peak_bytes == measured <= plan.budget_bytes


def bytes_of(timeline: Timeline, plan: planner.Plan) -> list[tuple]:
    """Start and peak of every phase of a stage."""
    stages = {stage.name for stage in plan.stages if stage.kind == "stage"}
    return [
        (span.action, span.stage, span.before_bytes, span.peak_bytes)
        for span in timeline.spans
        if span.stage in stages and span.action in ("forward", "backward")
    ]


def test_without_the_plan_every_stage_is_as_predicted(plan: planner.Plan, view: MeasuredStep) -> None:
    unplanned, _ = predicted_timelines(chain_in(plan), plan.schedule)
    assert bytes_of(view.unplanned, plan) == bytes_of(unplanned, plan)


def test_with_the_plan_the_same_stages_run_again(plan: planner.Plan, view: MeasuredStep) -> None:
    _, planned = predicted_timelines(chain_in(plan), plan.schedule)
    again = [[s.stage for s in t.spans if s.action == "recompute"] for t in (view.planned, planned)]
    assert again[0] and set(again[0]) <= set(again[1])
    for timeline in (view.planned, view.unplanned):
        assert list(dict.fromkeys(span.phase for span in timeline.spans)) == ["forward", "backward", "optimizer"]
        assert timeline.source == "measured"


def test_what_the_plan_knows_as_one_action_is_one_span(plan: planner.Plan) -> None:
    """What runs between two stages that are linked belongs to the stage before."""
    places = Places(plan)
    phases = [
        (Mark("forward", Place("stage", 0)), Phase(start_bytes=1, peak_bytes=5, end_bytes=2)),
        (Mark("forward", Place("outside", 1)), Phase(start_bytes=2, peak_bytes=7, end_bytes=3)),
        (Mark("forward", Place("stage", 1)), Phase(start_bytes=3, peak_bytes=4, end_bytes=4)),
        (Mark("end"), Phase(start_bytes=4, peak_bytes=9, end_bytes=4)),
    ]
    first, second = places.spans(phases, [1.0, 0.5, 2.0, 0.1])
    stages = [stage.name for stage in plan.stages if stage.kind == "stage"]
    assert (first.stage, first.before_bytes, first.peak_bytes, first.after_bytes) == (stages[0], 1, 7, 3)
    assert (first.end_seconds, second.start_seconds, second.end_seconds) == (1.5, 1.5, 3.5)
    assert (second.stage, second.peak_bytes) == (stages[1], 4)


def test_the_peak_s_parts_add_up_and_no_tensor_comes_twice(view: MeasuredStep, plan: planner.Plan) -> None:
    parts = view.peak.parts
    assert sum(part.size_bytes for part in parts) == view.peak.peak_bytes
    assert sum(row.size_bytes for row in peak_rows(view.peak, plan)) == view.peak.peak_bytes
    assert min(part.size_bytes for part in parts) > 0
    kinds = ("parameters", "gradients of parameters")
    # Gradients are named within their stages, of which any number may have gone backward before the peak.
    named = [(p.what, p.stage, p.module, p.size_bytes) for p in parts if p.what in kinds]
    assert len(named) == len(set(named))
    model = small_mlp().model
    assert sum(p.what == "parameters" for p in parts) == len(list(model.parameters()))


def test_the_model_is_left_as_it_was(plan: planner.Plan) -> None:
    work = small_mlp()
    before = [parameter.clone() for parameter in work.model.parameters()]
    state = torch.get_rng_state()
    view_step(work, plan, rounds=1)
    assert all(torch.equal(a, b) for a, b in zip(before, work.model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert all("forward" not in module.__dict__ for module in work.model.modules())
    assert planner.handle_of(work.model) is None


def test_another_model_is_refused(plan: planner.Plan) -> None:
    with pytest.raises(planner.errors.PlanMismatch):
        view_step(zoo.build("mlp", layers=8, hidden=16, batch=64), plan)


@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_a_compiled_model_is_refused(plan: planner.Plan, way: str) -> None:
    work = small_mlp()
    if way == "whole":
        work.model = torch.compile(work.model, backend="aot_eager")  # type: ignore[assignment]
    else:
        work.model[0].compile(backend="aot_eager")  # type: ignore[index,operator]
    with pytest.raises(ValueError, match="not compiled"):
        view_step(work, plan)


class Wandering(nn.Module):
    """Runs its blocks the other way round in every third step, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        self.steps = 0
        self.wanders = False

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        blocks = list(self.blocks)
        for block in reversed(blocks) if self.wanders and self.steps % 3 == 0 else blocks:
            x = block(x)
        return x


def test_a_step_that_takes_other_ways_is_refused() -> None:
    work = Workload(model=Wandering(), inputs=torch.randn(16, 32), loss=lambda y: y.sum())
    plan = planner.solve(planner.profile(work, stages=["blocks.*"], menus=False), "100%")
    work.model.wanders = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="in the same order every time"):
        view_step(work, plan)


def test_a_step_of_the_user_s_own_is_looked_at_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    x, optimizer = torch.rand(64, 32), torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    work = planner.Workload(model=model, step=step, optimizer=optimizer)
    plan = planner.solve(planner.profile(work, menus=False), "80%")
    view = view_step(work, plan, rounds=1)
    assert max(span.peak_bytes for span in view.planned.spans) == view.peak.peak_bytes == plan.predicted_peak_bytes
