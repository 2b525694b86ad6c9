"""Chen's greedy: segments filled up to a byte budget of their own, with a search over that budget.

Formulation: walk the chain and add up what the stages keep; where the sum passes the segment budget b, a segment
ends and its last boundary is held. Every value of b that cuts the chain differently is a candidate on an even grid
between the largest stage and the whole chain; the answer is the fastest whose replayed peak fits.
Guarantee: none for unequal stages; the best of its own candidates. Complexity: O(L B) for B budgets plus one replay
per different cut. Units: bytes and seconds.
Paper: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost" (2016), section 4.2, Algorithm 3.
"""

from __future__ import annotations

from solvers.chain.segments import Segment, droppable_runs, segmented_schedule
from solvers.problem.chain import Chain
from solvers.problem.chain_schedule import Schedule

_BUDGETS = 64  # an even search: finer ones cut chains of up to a few hundred stages hardly differently


def schedules(chain: Chain) -> list[Schedule]:
    """One schedule per different cut, each with its last segment kept and recomputed.

    >>> from solvers.problem.chain import Option, Stage
    >>> way = Option(forward_seconds=1, backward_seconds=2, kept_bytes=4, forward_peak_bytes=6,
    ...              backward_peak_bytes=1, recompute_seconds=1, recompute_peak_bytes=4)
    >>> stage = Stage(name="s", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    >>> sorted(schedule.forward_runs() for schedule in schedules(Chain(stages=(stage,) * 4)))
    [4, 6, 7, 7, 8, 8, 8, 8]
    """
    runs = droppable_runs(chain)
    sizes = [max(0, stage.options[0].kept_bytes) + stage.boundary_bytes for stage in chain.stages]
    least, most = max(sizes), sum(sizes)
    cuts = {_cut(runs, sizes, least + (most - least) * i // _BUDGETS): None for i in range(_BUDGETS + 1)}
    variants: dict[tuple[Segment, ...], None] = {}
    for cut in cuts:
        variants[*cut[:-1], cut[-1]._replace(kept=True)] = None
        variants[cut] = None
    return [segmented_schedule(variant) for variant in variants]


def _cut(runs: list[Segment], sizes: list[int], segment_budget: int) -> tuple[Segment, ...]:
    pieces: list[Segment] = []
    for run in runs:
        start, filled = run.start, 0
        for k in range(run.start, run.end):
            if filled and filled + sizes[k] > segment_budget:
                pieces.append(Segment(start, k, run.kept))
                start, filled = k, 0
            filled += sizes[k]
        pieces.append(Segment(start, run.end, run.kept))
    return tuple(pieces)
