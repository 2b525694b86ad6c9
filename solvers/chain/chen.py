"""Chen's two methods to cut a chain into segments: evenly into about sqrt(L), or filled up to a byte budget.

Formulation: only the boundaries before segments are held, and a segment is materialised whole at its backward.
``sqrt_segments`` cuts each run of stages that may be dropped together evenly into segments of about sqrt(L) stages.
``greedy_segments`` walks the chain and adds up what the stages keep; where the sum passes the segment budget b, a
segment ends. Every value of b that cuts the chain differently is a candidate on an even grid between the largest stage
and the whole chain; the answer is the fastest whose replayed peak fits.
Guarantee: O(sqrt(L)) memory for L equal stages with one extra forward; none for unequal ones. The last segment of the
chain is kept in one variant, since it goes backward at once, and recomputed in the other.
Complexity: O(L), and O(L B) for B segment budgets plus one replay per different cut. Units: bytes and seconds.
Paper: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost" (2016), section 4.1, and 4.2 with
Algorithm 3.
"""

from __future__ import annotations

import math
from itertools import pairwise

from solvers.chain.segments import Segment, droppable_runs, segmented_schedule
from solvers.problem.chain import Chain
from solvers.problem.deadline import check_deadline
from solvers.problem.schedule import Schedule


def sqrt_segments(chain: Chain) -> list[Schedule]:
    """The schedule with about sqrt(L) segments: with the last one kept, and with it recomputed.

    >>> from solvers.problem.examples import equal_stages
    >>> [schedule.forward_runs() for schedule in sqrt_segments(equal_stages(9))]
    [15, 18]
    """
    length = math.sqrt(len(chain.stages))
    segments = [segment for run in droppable_runs(chain) for segment in _cut_evenly(run, length)]
    kept_last = [*segments[:-1], segments[-1]._replace(option=0)]
    variants = [kept_last] if segments[-1].kept else [kept_last, segments]
    return [segmented_schedule(variant) for variant in variants]


def _cut_evenly(run: Segment, length: float) -> list[Segment]:
    size = run.end - run.start
    count = max(1, round(size / length))
    edges = [run.start + round(size * i / count) for i in range(count + 1)]
    return [Segment(a, b, run.option) for a, b in pairwise(edges)]


_BUDGETS = 64  # an even search: finer ones cut chains of up to a few hundred stages hardly differently


def greedy_segments(chain: Chain) -> list[Schedule]:
    """One schedule per different cut, each with its last segment kept and recomputed.

    >>> from solvers.problem.examples import equal_stages
    >>> sorted(schedule.forward_runs() for schedule in greedy_segments(equal_stages(4)))
    [4, 6, 7, 7, 8, 8, 8, 8]
    """
    runs = droppable_runs(chain)
    sizes = [max(0, stage.options[0].kept_bytes) + stage.boundary_bytes for stage in chain.stages]
    least, most = max(sizes), sum(sizes)
    cuts = {_cut_at_bytes(runs, sizes, least + (most - least) * i // _BUDGETS): None for i in range(_BUDGETS + 1)}
    variants: dict[tuple[Segment, ...], None] = {}
    for cut in cuts:
        variants[*cut[:-1], cut[-1]._replace(option=0)] = None
        variants[cut] = None
    return [segmented_schedule(variant) for variant in variants]


def _cut_at_bytes(runs: list[Segment], sizes: list[int], segment_budget: int) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for run in runs:
        check_deadline()
        start, filled = run.start, 0
        for k in range(run.start, run.end):
            if filled and filled + sizes[k] > segment_budget:
                segments.append(Segment(start, k, run.option))
                start, filled = k, 0
            filled += sizes[k]
        segments.append(Segment(start, run.end, run.option))
    return tuple(segments)
