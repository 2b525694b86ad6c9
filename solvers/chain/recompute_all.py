"""Recompute all: each stage that may be run again is dropped on its own, as per-block checkpointing does.

Formulation: every stage is a segment of its own; the boundary before it is held and the stage is recomputed directly
before its backward; stages that must run once are kept with option 0.
Guarantee: none beyond validity; every stage runs forward at most twice. Complexity: O(L). Units: bytes and seconds.
Paper: the per-layer checkpoints of Chen et al., "Training deep nets with sublinear memory cost" (2016), section 4.
"""

from __future__ import annotations

from solvers.chain.segments import Segment, segmented_schedule
from solvers.problem.chain import Chain
from solvers.problem.chain_schedule import Schedule


def schedules(chain: Chain) -> list[Schedule]:
    """The one schedule that recomputes every stage on its own.

    >>> from solvers.problem.chain import Option, Stage
    >>> way = Option(forward_seconds=1, backward_seconds=2, kept_bytes=4, forward_peak_bytes=6,
    ...              backward_peak_bytes=1, recompute_seconds=1, recompute_peak_bytes=4)
    >>> stage = Stage(name="s", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    >>> schedules(Chain(stages=(stage,) * 3))[0].forward_runs()
    6
    """
    segments = [Segment(k, k + 1, kept=not stage.recomputable) for k, stage in enumerate(chain.stages)]
    return [segmented_schedule(segments)]
