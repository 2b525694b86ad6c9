"""The dataflow of a traced stage, held against one worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from profiler.op_graph import StageOps
from profiler.trace.partition import choose_stages
from profiler.trace.stage_dataflow import pooled, stage_ops_of, without_seconds
from profiler.trace.step_trace import trace_step
from profiler.workload.workload import Workload
from tests.support.stage_cases import CASES
from tests.support.stage_cases.flows import flow_of
from tests.support.stage_cases.registry import ROWS, WIDTH, Pair, of_pair

# The first linear layer's ops, and the storages that they meet: weight, bias, input, result.
WEIGHT, BIAS, INPUT, HIDDEN = range(4)
T, ADDMM = range(2)


def short(flow: StageOps) -> list[tuple[Any, ...]]:
    return [(op.kind, op.reads, op.allocates, op.writes) for op in flow.ops]


def test_versions_and_views() -> None:
    def body(s: Pair, x: Tensor) -> Any:
        h = s.a(x)
        h.mul_(2).relu_()
        return h[:, :8].exp() + 1

    flow = flow_of(of_pair(body))
    assert short(flow) == [
        ("t", ((WEIGHT, 0),), (), ()),
        ("addmm", ((WEIGHT, 0), (BIAS, 0), (INPUT, 0)), (HIDDEN,), ()),
        ("mul_", ((HIDDEN, 0),), (), (HIDDEN,)),
        ("relu_", ((HIDDEN, 1),), (), (HIDDEN,)),
        ("slice", ((HIDDEN, 2),), (), ()),
        ("exp", ((HIDDEN, 2),), (4,), ()),
        ("add", ((4, 0),), (5,), ()),
    ]
    assert [op.module for op in flow.ops] == ["a", "a", "", "", "", "", ""]
    assert [s.size_bytes for s in flow.storages] == [1024, 64, 512, 512, 256, 256]
    assert [s.op for s in flow.storages] == [-1, -1, -1, 1, 5, 6]
    assert [s.versions for s in flow.storages] == [0, 0, 0, 2, 0, 0]
    assert [s.saved_in for s in flow.storages] == [("a",), (), ("a",), ("",), ("",), ()]
    assert [s.saved for s in flow.storages] == [bool(s.saved_in) for s in flow.storages]
    assert [s.always_live for s in flow.storages] == [True, True, True, False, False, False]
    assert [s.returned for s in flow.storages] == [False] * 5 + [True]
    assert not any(op.random for op in flow.ops)
    assert flow.modules == (("", "Pair"), ("a", "Linear"))


def test_each_module_that_saves_a_storage_is_told_and_each_result_of_an_op_has_its_number() -> None:
    relu = flow_of(CASES["relu_in_place"])
    assert relu.storages[HIDDEN].saved_in == ("", "b")
    norm = flow_of(CASES["statistics_read"])
    (batch_norm,) = (op for op in norm.ops if op.kind == "native_batch_norm")
    assert [norm.storages[number].output for number in batch_norm.allocates] == [0, 1, 2]
    # It does not read its statistics, though it is given them: it reads weight, bias and its input.
    assert len(batch_norm.reads) == 3


def test_an_input_is_held_if_it_is_saved_and_may_be_the_stage_s_own() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2).exp()

    class Saves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * x).exp()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Doubles(), Doubles(), Saves()

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x * 1)) + 1)

    work = Workload(model=Both(), inputs=torch.ones(ROWS, WIDTH, requires_grad=True), loss=lambda y: y.sum())
    trace = trace_step(work)
    flows = [stage_ops_of(trace, stage) for stage in choose_stages(trace, ["first", "second", "third"])]
    inputs = [next(s for s in flow.storages if s.op < 0) for flow in flows]
    assert [(s.always_live, s.dies_after_stage) for s in inputs] == [(False, False), (False, True), (True, False)]


# Around a stage ----------------------------------------------------------------------


def test_versions_count_from_what_a_stage_finds() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return (x + scale).exp()

    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Reads(), Reads()
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x, self.scale)
            self.scale.add_(1)
            return self.second(y, self.scale)

    work = Workload(model=Scaled(), inputs=torch.ones(ROWS, WIDTH, requires_grad=True), loss=lambda y: y.sum())
    trace = trace_step(work)
    first, second = (stage_ops_of(trace, stage) for stage in choose_stages(trace, ["first", "second"]))
    assert short(first) == short(second)


def test_ops_that_draw_are_told() -> None:
    drawing = {op.kind for op in flow_of(CASES["draws"]).ops if op.random}
    assert {"rand_like", "bernoulli", "normal_", "randperm", "multinomial", "uniform_", "randint"} <= drawing
    assert drawing.isdisjoint({"empty_like", "exp", "sigmoid", "index", "gather"})


# Stages that are alike ---------------------------------------------------------------


def test_seconds_are_pooled_by_their_median() -> None:
    flow = flow_of(CASES["chain_in_place"])
    timed = [
        replace(flow, ops=tuple(replace(op, seconds=factor * (k + 1)) for k, op in enumerate(flow.ops)))
        for factor in (3.0, 1.0, 100.0)
    ]
    assert [op.seconds for op in pooled(timed).ops] == [3.0 * (k + 1) for k in range(len(flow.ops))]
    assert without_seconds(timed[0]) == without_seconds(timed[1]) == without_seconds(flow) != flow
