"""Schedules of segments: which stages may form one, and the actions of a chain cut into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from solvers.problem.chain import Chain
from solvers.problem.deadline import check_deadline
from solvers.problem.schedule import Action, Schedule


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
