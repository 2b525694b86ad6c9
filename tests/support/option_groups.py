"""Groups of stages that run as programs, and phases by mark, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from profiler.measurement.captured_stages import CapturedKind
from profiler.measurement.meter import Mark, Place
from profiler.measurement.program_steps import OptionGroup
from profiler.op_graph import StageOp, StageOps, StageStorage
from profiler.records import Phase
from profiler.step_graph import StepGraph, StepOp, StepStorage

INPUT, FIRST, SECOND, THIRD = range(4)


def flow(**changes: object) -> StageOps:
    """Three ops, each reading what the one before made; all they make is saved. The input is the stage's own."""
    ops = tuple(
        StageOp(op=f"aten.op{k}.default", module="", seconds=1.0, reads=((k, 0),), allocates=(k + 1,)) for k in range(3)
    )
    made = tuple(StageStorage(size_bytes=8, op=k, saved=True) for k in range(3))
    taken = StageStorage(size_bytes=8, op=-1, always_live=True)
    return replace(StageOps(ops=ops, storages=(taken, *made)), **changes)


def step_graph() -> StepGraph:
    """Two ops of forward, of a second and three; of backward one, of four seconds, that reads what the first makes."""
    return StepGraph(
        ops=(
            StepOp(name="mul", op="aten.mul.Tensor", makes=(0,), seconds=1.0),
            StepOp(name="exp", op="aten.exp.default", reads=(0,), makes=(1,), seconds=3.0),
            StepOp(name="sin", op="aten.sin.default", side="backward", reads=(0, 2), makes=(3,), seconds=4.0),
        ),
        storages=(
            StepStorage(size_bytes=16),
            StepStorage(size_bytes=8, returned=True),
            StepStorage(size_bytes=8, of_loss=True),
            StepStorage(size_bytes=4, gradient=True),
        ),
        resident_bytes=0,
    )


def group(members: list[int], *, family: int = 0, ops: StageOps | None = None, opaque: str = "") -> OptionGroup:
    """Stages that run as programs, or are opaque."""
    captured = CapturedKind(opaque=opaque) if opaque else CapturedKind(graph=step_graph())
    return OptionGroup(ops or flow(), members, family, captured)


Direction = Literal["forward", "backward"]
FORWARD: Direction = "forward"
BACKWARD: Direction = "backward"


def marked(phase: Direction, stage: int, **values: Any) -> tuple[Mark, list[Phase]]:
    return Mark(phase, Place("stage", stage)), [Phase(**values)]
