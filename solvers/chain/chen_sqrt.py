"""Chen's square root: about sqrt(L) segments of equal length.

Formulation: each run of stages that may be dropped together is cut evenly into segments of about sqrt(L) stages;
only the boundaries before segments are held, and a segment is materialised whole at its backward.
Guarantee: O(sqrt(L)) memory for L equal stages with one extra forward; none for unequal ones. The last segment of
the chain is kept in one variant, since it goes backward at once, and recomputed in the other.
Complexity: O(L). Units: bytes and seconds.
Paper: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost" (2016), section 4.1.
"""

from __future__ import annotations

import math
from itertools import pairwise

from solvers.chain.segments import Segment, droppable_runs, segmented_schedule
from solvers.problem.chain import Chain
from solvers.problem.chain_schedule import Schedule


def schedules(chain: Chain) -> list[Schedule]:
    """The schedule with about sqrt(L) segments: with the last one kept, and with it recomputed.

    >>> from solvers.problem.chain import Option, Stage
    >>> way = Option(forward_seconds=1, backward_seconds=2, kept_bytes=4, forward_peak_bytes=6,
    ...              backward_peak_bytes=1, recompute_seconds=1, recompute_peak_bytes=4)
    >>> stage = Stage(name="s", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    >>> [schedule.forward_runs() for schedule in schedules(Chain(stages=(stage,) * 9))]
    [15, 18]
    """
    length = math.sqrt(len(chain.stages))
    segments = [piece for run in droppable_runs(chain) for piece in _cut(run, length)]
    kept_last = [*segments[:-1], segments[-1]._replace(kept=True)]
    variants = [kept_last] if segments[-1].kept else [kept_last, segments]
    return [segmented_schedule(variant) for variant in variants]


def _cut(run: Segment, length: float) -> list[Segment]:
    size = run.end - run.start
    pieces = max(1, round(size / length))
    edges = [run.start + round(size * i / pieces) for i in range(pieces + 1)]
    return [Segment(a, b, run.kept) for a, b in pairwise(edges)]
