"""Schedules of segments: which stages may form one, and the actions of a chain cut into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from solvers.problem.chain import Chain
from solvers.problem.chain_schedule import Action, Schedule


class Segment(NamedTuple):
    """Stages ``start..end-1``: run again together from the boundary before them, or all kept with option 0."""

    start: int
    end: int
    kept: bool = False


def droppable_runs(chain: Chain) -> list[Segment]:
    """The chain cut where no segment may reach across: runs of recomputable, linked stages, and fixed stages kept."""
    runs: list[Segment] = []
    for k, stage in enumerate(chain.stages):
        joins = bool(runs) and not runs[-1].kept and stage.recomputable and stage.linked
        if joins:
            runs[-1] = runs[-1]._replace(end=k + 1)
        else:
            runs.append(Segment(k, k + 1, kept=not stage.recomputable))
    return runs


def segmented_schedule(segments: Sequence[Segment]) -> Schedule:
    """The actions of consecutive segments that cover a chain.

    A segment that is not kept is materialised whole directly before its backward: its last stage is
    recomputed, the others run forward with option 0.
    """
    actions: list[Action] = []
    for segment in segments:
        actions.extend(_first_pass(segment))
    for segment in reversed(segments):
        actions.extend(_second_pass(segment))
    return Schedule(actions=tuple(actions))


def _first_pass(segment: Segment) -> Iterator[Action]:
    for k in range(segment.start, segment.end):
        yield Action("forward", k, 0 if segment.kept else None)
        if k > segment.start and not segment.kept:
            yield Action("free", k - 1)


def _second_pass(segment: Segment) -> Iterator[Action]:
    last = segment.end - 1
    yield Action("free", last)
    if not segment.kept:
        for k in range(segment.start, last):
            yield Action("forward", k, 0)
        yield Action("recompute", last, 0)
    yield Action("backward", last)
    for k in reversed(range(segment.start, last)):
        yield Action("free", k)
        yield Action("backward", k)
