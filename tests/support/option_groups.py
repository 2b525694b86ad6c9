"""Groups of stages with choices, and phases by mark, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from profiler.measurement.meter import Mark, Place
from profiler.measurement.stage_options import OptionGroup
from profiler.op_graph import Choice, StageOp, StageOps, StageStorage
from profiler.records import Phase

INPUT, FIRST, SECOND, THIRD = range(4)


def flow(**changes: object) -> StageOps:
    """Three ops, each reading what the one before made; all they make is saved. The input is the stage's own."""
    ops = tuple(
        StageOp(op=f"aten.op{k}.default", module="", seconds=1.0, reads=((k, 0),), allocates=(k + 1,)) for k in range(3)
    )
    made = tuple(StageStorage(size_bytes=8, op=k, saved=True) for k in range(3))
    taken = StageStorage(size_bytes=8, op=-1, always_live=True)
    return replace(StageOps(ops=ops, storages=(taken, *made)), **changes)


def choices(count: int) -> list[Choice]:
    return [Choice(f"choice {k}", (), frozenset({k})) for k in range(count)]


def group(members: list[int], count: int, family: int = 0, ops: StageOps | None = None) -> OptionGroup:
    return OptionGroup(ops or flow(), members, choices(count), family)


Direction = Literal["forward", "backward"]
FORWARD: Direction = "forward"
BACKWARD: Direction = "backward"


def marked(phase: Direction, stage: int, **values: Any) -> tuple[Mark, list[Phase]]:
    return Mark(phase, Place("stage", stage)), [Phase(**values)]
