"""Schedules of segments: the two that need no solver, and Chen's two methods to cut a chain.

A segment is consecutive stages that are kept, or of which only the boundary before them is held and that are
recomputed together, directly before their backward.

Formulation: ``keep_all`` runs every stage once with option 0. ``recompute_all`` makes every stage a segment of its own;
stages that must run once are kept with option 0. ``sqrt_segments`` cuts each run of stages that may be dropped together
evenly into segments of about sqrt(L) stages. ``greedy_segments`` walks the chain and adds up what the stages keep;
where the sum passes the segment budget b, a segment ends. Every value of b that cuts the chain differently is a
candidate on an even grid between the largest stage and the whole chain.
Guarantee: ``keep_all`` is the reference point, with the peak that every other schedule is compared with; not always the
fastest, since another option of a stage may be faster. With ``recompute_all`` every stage runs forward at most twice.
Chen's methods: O(sqrt(L)) memory for L equal stages with one extra forward; none for unequal ones. The last segment of
the chain is kept in one variant, since it goes backward at once, and recomputed in the other.
Complexity: O(L), and O(L B) for B segment budgets. Units: bytes and seconds of the chain.
Paper: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost" (2016), section 4.1, and 4.2 with
Algorithm 3; the checkpoints per layer of section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from solvers.problem.chain import Chain
from solvers.problem.deadline import check_deadline
from solvers.problem.schedule import Action, Schedule
from solvers.problem.simulator import Replay, replay


class Segment(NamedTuple):
    """Stages ``start..end-1`` and what happens to them.

    Attributes:
        option: they are kept with this one; None: they run again together, from the boundary before them.
        undecided: a single stage that a solver decides for.
    """

    start: int
    end: int
    option: int | None = None
    undecided: bool = False

    @property
    def kept(self) -> bool:
        """Whether they do not run again."""
        return self.option is not None


def droppable_runs(chain: Chain) -> list[Segment]:
    """The chain cut where no segment may reach across: runs of recomputable, linked stages, and fixed stages kept."""
    runs: list[Segment] = []
    for k, stage in enumerate(chain.stages):
        joins = bool(runs) and not runs[-1].kept and stage.recomputable and stage.linked
        if joins:
            runs[-1] = runs[-1]._replace(end=k + 1)
        else:
            runs.append(Segment(k, k + 1, None if stage.recomputable else 0))
    return runs


def segmented_schedule(segments: Sequence[Segment]) -> Schedule:
    """The actions of consecutive segments that cover a chain.

    A segment that is not kept is materialised whole directly before its backward: its last stage is
    recomputed, the others run forward with option 0.
    """
    actions: list[Action] = []
    for segment in segments:
        check_deadline()
        actions.extend(first_pass(segment.start, segment.end, segment.option))
    for segment in reversed(segments):
        check_deadline()
        actions += [Action("free", segment.end - 1), *second_pass(segment.start, segment.end, segment.option)]
    return Schedule(actions=tuple(actions))


def first_pass(start: int, end: int, option: int | None) -> Iterator[Action]:
    """The forwards of stages ``start..end-1``: kept with an option, or dropped but for the boundary after the last."""
    for k in range(start, end):
        yield Action("forward", k, option)
        if k > start and option is None:
            yield Action("free", k - 1)


def second_pass(start: int, end: int, option: int | None) -> Iterator[Action]:
    """Their backwards, once the boundary after the last is freed; dropped stages run again from the one before."""
    last = end - 1
    if option is None:
        for k in range(start, last):
            yield Action("forward", k, 0)
        yield Action("recompute", last, 0)
    yield Action("backward", last)
    for k in reversed(range(start, last)):
        yield Action("free", k)
        yield Action("backward", k)


def keep_all(chain: Chain) -> list[Schedule]:
    """The one schedule that keeps every stage.

    >>> from solvers.problem.examples import equal_stages
    >>> keep_all(equal_stages(3))[0].forward_runs()
    3
    """
    return [segmented_schedule([Segment(0, len(chain.stages), option=0)])]


def keep_all_replay(chain: Chain) -> Replay:
    """The step that keeps everything: what 100% of a budget and the unplanned seconds mean for a chain."""
    return replay(chain, keep_all(chain)[0])


def recompute_all(chain: Chain) -> list[Schedule]:
    """The one schedule that recomputes every stage on its own.

    >>> from solvers.problem.examples import equal_stages
    >>> recompute_all(equal_stages(3))[0].forward_runs()
    6
    """
    segments = [Segment(k, k + 1, None if stage.recomputable else 0) for k, stage in enumerate(chain.stages)]
    return [segmented_schedule(segments)]


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
