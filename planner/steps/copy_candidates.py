"""What of a step may wait in host memory: results of forward that backward reads, dearest to compute again first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.steps.graph_problem import StepSurroundings, small_of
from planner.steps.op_groups import OpGroup, groups_of
from profiler.step_graph import StepGraph
from solvers.problem.link import Link

# Less than a page is not worth a copy and the memory of its host buffer.
SMALLEST_BYTES = 4096
LINK_SHARES = (0.25, 0.5, 1.0, math.inf)  # of a side's seconds, what its copies take: each is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCandidate:
    """The large results of one op, which are sent together or not at all.

    Attributes:
        storages: that may be sent.
        size_bytes: of them.
        seconds: of one run of the op, and of those that run with it.
    """

    storages: tuple[int, ...]
    size_bytes: int
    seconds: float


def candidates_of(step: StepGraph, around: StepSurroundings) -> list[SendCandidate]:
    """What may be sent, by falling seconds per byte of computing it again.

    Not what forward returns or writes into buffers, what is a gradient, and what is smaller than a page.
    """
    small = small_of(step, around)
    saved = {s for op in step.ops if op.side == "backward" for s in op.reads}
    found = (_candidate(step, group, small) for group in groups_of(step, small))
    sendable = [each for each in found if each is not None and saved.issuperset(each.storages)]
    return sorted(sendable, key=lambda each: -each.seconds / each.size_bytes)


def _candidate(step: StepGraph, group: OpGroup, small: frozenset[int]) -> SendCandidate | None:
    op = step.ops[group.ops[-1]]
    made = tuple(s for s in op.makes if s not in small)
    storages = [step.storages[s] for s in made]
    lasting = any(storage.returned or storage.written or storage.gradient for storage in storages)
    smallest_bytes = min((storage.size_bytes for storage in storages), default=0)
    if op.side == "backward" or lasting or smallest_bytes < SMALLEST_BYTES or set(made) & set(op.once_makes):
        return None
    return SendCandidate(
        storages=made,
        size_bytes=sum(storage.size_bytes for storage in storages),
        seconds=sum(step.ops[ordinal].seconds for ordinal in group.ops),
    )


def sets_to_send(
    candidates: Sequence[SendCandidate], link: Link, forward_seconds: float, backward_seconds: float
) -> Iterator[frozenset[int]]:
    """Different sets of storages, from few to all that the host may hold.

    Args:
        candidates: the dearest to compute again first.
        link: over which they are sent.
        forward_seconds, backward_seconds: of the step, beside which they are copied.
    """
    known: set[frozenset[int]] = set()
    for share in LINK_SHARES:
        limits = (share * forward_seconds, share * backward_seconds, link.host_bytes)
        chosen = frozenset(_within(candidates, link, *limits))
        if chosen and chosen not in known:
            known.add(chosen)
            yield chosen


def _within(
    candidates: Sequence[SendCandidate],
    link: Link,
    to_host_seconds: float,
    to_device_seconds: float,
    host_bytes: int | None,
) -> Iterator[int]:
    """Storages of candidates whose copies take no longer than that each way, and no more host memory."""
    left_bytes = math.inf if host_bytes is None else host_bytes
    for each in candidates:
        there, back = link.to_host_seconds(each.size_bytes), link.to_device_seconds(each.size_bytes)
        if there <= to_host_seconds and back <= to_device_seconds and each.size_bytes <= left_bytes:
            to_host_seconds, to_device_seconds = to_host_seconds - there, to_device_seconds - back
            left_bytes -= each.size_bytes
            yield from each.storages
