"""A chain of four equal stages, small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

from solvers import Action, Chain, Schedule
from solvers.problem.examples import equal_stages

DROPPED = Schedule(
    actions=tuple(
        Action(*row)
        for row in [
            ("forward", 0), ("forward", 1, 0), ("free", 1), ("backward", 1), ("free", 0),
            ("recompute", 0, 0), ("backward", 0),
        ]
    )
)  # fmt: skip


def small_chain() -> Chain:
    names = ("first", "second", "third", "fourth")
    return Chain(stages=tuple(replace(equal_stages(1).stages[0], name=name) for name in names))


def two_stages() -> Chain:
    """Of the small chain: a stage keeps 4, returns 1, needs 6 in forward (2 without keeping), 1 in backward."""
    return replace(small_chain(), stages=small_chain().stages[:2], resident_bytes=10, optimizer_peak_bytes=15)
