"""Frugal profiles capture stages as plain ones do, and their programs' bytes are those of the plan that runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.measurement import captured_stages, measuring
from profiler.measurement.meter import Meter, memory_meter
from profiler.records import MenuRecord
from profiler.trace.joint_graph import step_graph_of
from profiler.workload.steps import TensorsOfState, resident_bytes_of
from profiler.workload.workload import Workload
from tests.support.exactness import assert_same, state_after
from tests.support.step_peaks import noted_peaks

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def workload() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model=model, inputs=torch.randn(256, WIDTH), loss=lambda y: y.square().mean(), optimizer=optimizer)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The peaks of all steps under the memory meter."""
    return noted_peaks(monkeypatch)


def shape_of(menu: MenuRecord) -> Any:
    """What does not depend on seconds: the ops of the graph, and the bytes of the program that was measured."""
    once = menu.once
    if menu.graph is None or once is None:
        return menu.opaque
    graph = replace(menu.graph, ops=tuple(replace(op, seconds=0.0) for op in menu.graph.ops))
    return graph, once.runs, once.freed_bytes, once.forward_peak_bytes, once.backward_peak_bytes, once.kept


@pytest.mark.slow
def test_stages_are_captured_within_the_limit_and_plans_of_their_programs_hold(peaks: list[int]) -> None:
    plain = planner.profile(workload(), stages=["Block"])
    limit = plain.unplanned_peak_bytes * 7 // 10
    peaks.clear()
    frugal = planner.profile(workload(), stages=["Block"], limit=limit)
    assert frugal.frugal and max(peaks) <= limit
    assert all(menu.graph is not None and len(menu.options) > 1 for menu in frugal.menus)
    assert list(map(shape_of, frugal.menus)) == list(map(shape_of, plain.menus))
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(frugal, 1)
    least, most = refusal.value.minimum_budget_bytes, plain.unplanned_peak_bytes
    assert least is not None
    stated = planner.state(frugal, planner.Rule(modules="[1-6]", ops=["gelu", "native_layer_norm"]))
    assert [stage.decision for stage in stated.stages].count("selective") == 6
    budgets = [least + int(share * (most - least)) for share in (0.0, 0.3, 0.6)]
    expected = state_after(workload())
    for plan in (stated, *(planner.solve(frugal, budget) for budget in budgets)):
        work = workload()
        with planner.apply(work.model, plan):
            assert_same(state_after(work), expected)
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_capturing_takes_no_more_than_the_limit_either(peaks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what its ops take when each is measured by itself: one meter at a time."""
    work = workload()
    limit = planner.profile(workload(), stages=["Block"], menus=False).unplanned_peak_bytes * 13 // 20

    def metered() -> Meter:
        return memory_meter(work.device, resident_bytes_of(work).total, TensorsOfState(work))

    monkeypatch.setattr(measuring, "NoMeter", metered)
    monkeypatch.setattr(captured_stages, "measured_graph", lambda graph, _: step_graph_of(graph))
    peaks.clear()
    frugal = planner.profile(work, stages=["Block"], limit=limit)
    assert all(menu.graph is not None for menu in frugal.menus)
    assert max(peaks) <= limit


@pytest.mark.slow
def test_where_there_is_no_room_to_check_a_program_stages_are_opaque_and_say_so(peaks: list[int]) -> None:
    """The smallest limit that does for the rest of the profile."""
    with pytest.raises(planner.errors.ProfileError) as refused:
        planner.profile(workload(), stages=["Block"], limit=1)
    limit = int(str(refused.value).split("it takes ")[1].split()[0])
    while True:
        peaks.clear()
        try:
            frugal = planner.profile(workload(), stages=["Block"], limit=limit)
            break
        except planner.errors.ProfileError as error:
            limit = int(str(error).split("it takes ")[1].split()[0])
    assert max(peaks) <= limit
    assert all(f"and the limit is {limit:,}" in menu.opaque and not menu.options for menu in frugal.menus)
    assert all(stage.recomputable for stage in frugal.stages if stage.kind == "stage")
