"""A chain of four equal stages, small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

from solvers import Action, Chain, Option, Schedule, Stage

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
    way = Option(
        forward_seconds=1.0, backward_seconds=2.0, kept_bytes=4, forward_peak_bytes=6,
        backward_peak_bytes=1, recompute_seconds=1.0, recompute_peak_bytes=4,
    )  # fmt: skip
    names = ("first", "second", "third", "fourth")
    stages = [
        Stage(name=name, options=(way,), boundary_bytes=1, forward_seconds=1.0, forward_peak_bytes=2) for name in names
    ]
    return Chain(stages=tuple(stages))


def two_stages() -> Chain:
    """Of the small chain: a stage keeps 4, returns 1, needs 6 in forward (2 without keeping), 1 in backward."""
    return replace(small_chain(), stages=small_chain().stages[:2], resident_bytes=10, optimizer_peak_bytes=15)
