"""Stages and what is inside them can be named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from profiler.json_files import from_plain, to_plain
from profiler.op_graph import NamedStage, StageOps
from profiler.trace.partition import ChosenStage, choose_stages, parents_of
from profiler.trace.stage_dataflow import stage_ops_of
from profiler.trace.step_record import Trace
from profiler.trace.step_trace import trace_step
from profiler.workload.workload import Workload
from tests.support.odd_models import workload


def named(trace: Trace, stages: Sequence[ChosenStage]) -> list[NamedStage]:
    return [
        NamedStage(name=stage.name, parents=parents_of(trace, stage.call), ops=stage_ops_of(trace, stage))
        for stage in stages
    ]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Sequential(nn.Linear(8, 8), nn.GELU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.before(x))


def test_names_around_and_inside_of_stages():
    work = Workload(model=Outer(), inputs=torch.randn(4, 8), loss=lambda y: y.sum())
    trace = trace_step(work)
    stages = choose_stages(trace, ["body.*"])
    first, second = named(trace, stages)
    assert first.parents == (("", "Outer"), ("body", "Sequential"))
    assert first.inside() == (("body.0", "Sequential"), ("body.0.0", "Linear"), ("body.0.1", "GELU"))
    assert second.inside()[0] == ("body.1", "Sequential")


def test_a_further_call_of_a_module_has_the_module_s_names():
    work = workload("shared")
    trace = trace_step(work)
    stages = choose_stages(trace, ["shared"])
    found = named(trace, stages)
    assert [stage.name for stage in found] == ["shared", "shared#1", "shared#2"]
    assert {stage.module for stage in found} == {"shared"}
    assert all(("shared.inner.2", "GELU") in stage.inside() for stage in found)


class Borrows(nn.Module):
    """Calls a module that it does not own."""

    def __init__(self, lent: nn.Module) -> None:
        super().__init__()
        self.own, self.lent = nn.Linear(8, 8), [lent]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lent[0](self.own(x))


def test_what_a_module_calls_and_does_not_own_has_its_own_name():
    lent = nn.GELU()
    model = nn.Sequential(Borrows(lent), nn.Linear(8, 8), lent)
    trace = trace_step(Workload(model=model, inputs=torch.randn(4, 8), loss=lambda y: y.sum()))
    (stage,) = choose_stages(trace, ["0"])
    ops = stage_ops_of(trace, stage)
    assert ops.modules == (("", "Borrows"), ("own", "Linear"))
    assert [op.module for op in ops.ops if op.kind == "gelu"] == [""]


def test_modules_go_through_a_document():
    flow = StageOps(ops=(), storages=(), modules=(("", "Block"), ("drop", "Drop")))
    assert from_plain(StageOps, to_plain(flow)) == flow
    old = {key: value for key, value in to_plain(flow).items() if key != "modules"}
    assert from_plain(StageOps, old) == replace(flow, modules=())
