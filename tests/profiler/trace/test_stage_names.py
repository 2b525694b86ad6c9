"""Stages and what is inside them can be named, and a choice that a person states is measured and stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from profiler.json_files import from_plain, to_plain
from profiler.measurement.profiling import profile
from profiler.op_graph import Choice, ChoiceError, StageOp, StageOps, StageStorage
from profiler.trace.partition import choose_stages
from profiler.trace.stage_dataflow import stage_ops_of
from profiler.trace.stage_names import names_outside, with_names
from profiler.trace.step_trace import trace_step
from profiler.workload.workload import Workload
from tests.support.odd_models import workload


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Sequential(nn.Linear(8, 8), nn.GELU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.before(x))


def test_names_around_inside_and_outside_of_stages():
    work = Workload(model=Outer(), inputs=torch.randn(4, 8), loss=lambda y: y.sum())
    trace = trace_step(work)
    stages = choose_stages(trace, ["body.*"])
    first, second = with_names(trace, stages, [stage_ops_of(trace, stage) for stage in stages])
    assert first.parents == (("", "Outer"), ("body", "Sequential"))
    assert first.inside() == (("body.0", "Sequential"), ("body.0.0", "Linear"), ("body.0.1", "GELU"))
    assert second.inside()[0] == ("body.1", "Sequential")
    assert names_outside(trace, stages) == ("before",)


def test_a_further_call_of_a_module_has_the_module_s_names():
    work = workload("shared")
    trace = trace_step(work)
    stages = choose_stages(trace, ["shared"])
    found = with_names(trace, stages, [stage_ops_of(trace, stage) for stage in stages])
    assert [stage.name for stage in found] == ["shared", "shared#1", "shared#2"]
    assert {stage.module for stage in found} == {"shared"}
    assert all(("shared.inner.2", "GELU") in stage.inside() for stage in found)


class Sums(nn.Module):
    """To run its ReLU again alone frees nothing: instead of the output, the sum has to be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.left(x) + self.right(x))


def relu_again(ops: StageOps) -> Choice:
    return Choice.dropping(ops, [k for k, op in enumerate(ops.ops) if op.kind == "relu"])


def test_a_stated_choice_stays_though_keeping_everything_beats_it():
    model = nn.Sequential(Sums(), Sums(), nn.Linear(8, 8))
    work = Workload(model=model, inputs=torch.randn(4, 8), loss=lambda y: y.sum())
    names = []

    def state(stages, outside):
        names.extend([[stage.name for stage in stages], list(outside)])
        return {1: replace(relu_again(stages[1].ops), stated=True)}

    proposed = profile(work, stages=["0", "1"], propose=lambda ops: [relu_again(ops)])
    stated = profile(work, stages=["0", "1"], propose=lambda ops: [relu_again(ops)], state=state)
    assert names == [["0", "1"], ["2"]]
    assert [menu.options for menu in proposed.menus] == [(), ()]
    assert [[len(option.rerun) for option in menu.options] for menu in stated.menus] == [[], [1]]
    assert [record.parents for record in stated.stages if record.name == "1"] == [(("", "Sequential"),)]


def test_what_cannot_be_stated_is_said_as_it_is():
    def state(stages, outside):
        raise ChoiceError("no such thing")

    with pytest.raises(ChoiceError, match="^no such thing$"):
        profile(workload("plain"), state=state)


def flow() -> StageOps:
    """An op that must not run again, and one that reads what it makes; both results are saved."""
    return StageOps(
        ops=(
            StageOp(
                op="aten.bernoulli.default",
                module="drop",
                seconds=1.0,
                allocates=(0,),
                not_rerunnable_reason="its generator is own",
            ),
            StageOp(op="aten.mul.Tensor", module="", seconds=1.0, reads=((0, 0),), allocates=(1,)),
        ),
        storages=(StageStorage(size_bytes=4, op=0, saved=True), StageStorage(size_bytes=4, op=1, saved=True)),
        modules=(("", "Block"), ("drop", "Drop")),
    )


def test_an_op_that_must_not_run_again_does_so_only_if_forced():
    with pytest.raises(ChoiceError, match="bernoulli.* in drop.*its generator is own"):
        Choice.dropping(flow(), [0, 1])
    assert Choice.dropping(flow(), [0, 1], forced=[0]).rerun == {0, 1}
    assert Choice.dropping(flow(), [1]).rerun == {1}


def test_modules_go_through_a_document():
    assert from_plain(StageOps, to_plain(flow())) == flow()
    old = {key: value for key, value in to_plain(flow()).items() if key != "modules"}
    assert from_plain(StageOps, old) == replace(flow(), modules=())
