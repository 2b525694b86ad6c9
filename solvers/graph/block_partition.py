"""Cuts a training graph into a chain of blocks: consecutive forward nodes and the backward nodes that go with them.

A cut is narrow where forward nodes read only one output across it, apart from those that may last. Blocks lie between
narrow cuts; where much crosses them there is none, as long as blocks stay small. The backward nodes, in their own
order, are cut where they stop reading what one block made. What is read beyond the next block is *lasting*: it is
never run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from solvers.arrays import Indices, Integers, Mask
from solvers.graph.liveness import IndexedGraph, peak_profile
from solvers.problem.deadline import check_deadline

MOST_BLOCKS = 60  # a table of 60 stages and 15 options takes about a second
MOST_NODES = 80  # forward nodes of a block: programs for more take a second each and give no better answers
_SMALL = 1e-3  # of the forward's bytes: outputs with no more may last
_MANY, _LONG = 4, 1 / 8  # readers, and share of the forward nodes between the first and the last: such outputs may last
_HUGE = 1 / 2  # of the forward's bytes: a block with more is cut even where much is read across
_SIDE = 1 / 4  # of a block's bytes that either side of such a cut has at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One stage of the chain that a graph is taken for.

    Attributes:
        forward, backward: its nodes, consecutive.
        entry: what it reads of the block before: that block's boundary.
        boundary: its outputs that the next block reads, forward or backward.
        lasting: its outputs that are held from their first run until nobody reads them any more.
        lasting_bytes: of all outputs, of whatever block, that are held until this block's backward is over.
    """

    forward: range
    backward: range
    entry: tuple[int, ...]
    boundary: tuple[int, ...]
    lasting: tuple[int, ...]
    lasting_bytes: int


def cut_into_blocks(indexed: IndexedGraph, rerunnable: Mask, largest_share: float) -> list[Block]:
    """Blocks in forward order, which together hold every node; one block where there is nothing to cut.

    ``largest_share``: of the forward's bytes in one block, where narrow cuts allow it.

    >>> from solvers.problem.examples import training_graph
    >>> indexed = IndexedGraph(training_graph(3))
    >>> for block in cut_into_blocks(indexed, np.ones(6, dtype=bool), 0.1):
    ...     print(block.forward, block.backward, block.boundary, block.lasting_bytes)
    range(0, 1) range(5, 6) (0,) 0
    range(1, 2) range(5, 5) (1,) 0
    range(2, 3) range(3, 5) () 0
    """
    backward_start = first_backward_node(indexed)
    cuts = _forward_cuts(indexed, backward_start, largest_share)
    block_of = np.searchsorted(cuts, np.arange(indexed.count), side="right") - 1
    block_of[backward_start:] = -1
    starts = _backward_starts(indexed, backward_start, block_of, len(cuts) - 1)
    for k, (start, end) in enumerate(pairwise([*starts[::-1], indexed.count])):
        block_of[start:end] = len(starts) - 1 - k
    return _blocks(indexed, rerunnable, backward_start, block_of, cuts, [*starts, backward_start])


def first_backward_node(indexed: IndexedGraph) -> int:
    """The first backward node: as the labels say, or where they mix, the node after which most bytes lie idle."""
    backward = np.array([node.side == "backward" for node in indexed.graph.nodes])
    backward_start = int(backward.argmax()) if backward.any() else 0
    if backward_start and backward[backward_start:].all():
        return backward_start
    idle = peak_profile(indexed, range(indexed.count)) - indexed.working_bytes
    return int(idle.argmax()) + 1


def _forward_cuts(indexed: IndexedGraph, backward_start: int, largest_share: float) -> list[int]:
    """Where the blocks start, and where the backward does."""
    cumulative = np.concatenate(([0], np.cumsum(indexed.output_bytes[:backward_start])))
    count, crossing = _crossing(indexed, backward_start)
    narrow = [p for p in range(1, backward_start) if count[p] <= 1]
    cuts = _without_wide_cuts([0, *narrow, backward_start], cumulative, crossing, largest_share)
    return _at_most_blocks(_with_huge_split(cuts, cumulative, crossing), cumulative)


def _crossing(indexed: IndexedGraph, backward_start: int) -> tuple[Integers, Integers]:
    """For every place of the forward nodes how many outputs are read across it, and their bytes.

    Not counted is what may just as well last: what is small, and what many nodes read over a long stretch, such as a
    mask for all layers, or an encoder's output.
    """
    count, size = np.zeros(backward_start + 1, dtype=np.int64), np.zeros(backward_start + 1, dtype=np.int64)
    small_bytes = _SMALL * float(indexed.output_bytes[:backward_start].sum())
    for v in np.flatnonzero(indexed.output_bytes[:backward_start]):
        check_deadline()
        readers = [r for r in indexed.readers[v] if r < backward_start]
        last = max(readers, default=int(v))
        size[v + 1 : last + 1] += indexed.output_bytes[v]
        shared = len(readers) >= _MANY and last - v > _LONG * backward_start
        if indexed.output_bytes[v] > small_bytes and not shared:
            count[v + 1 : last + 1] += 1
    return count, size


def _without_wide_cuts(cuts: list[int], cumulative: Integers, crossing: Integers, largest_share: float) -> list[int]:
    """Where the most bytes cross there is no cut, as long as no block grows larger than its share."""
    left = dict(zip(cuts[1:], cuts, strict=False))
    right = dict(pairwise(cuts))
    for cut in sorted(cuts[1:-1], key=lambda cut: (-crossing[cut], cut)):
        before, after = left[cut], right[cut]
        if after - before <= MOST_NODES and cumulative[after] - cumulative[before] <= largest_share * cumulative[-1]:
            right[before], left[after] = after, before
            del left[cut], right[cut]
    return [*sorted(right), cuts[-1]]


def _at_most_blocks(cuts: list[int], cumulative: Integers) -> list[int]:
    """At most ``MOST_BLOCKS``: the two neighbours that are smallest together become one."""
    while len(cuts) - 1 > MOST_BLOCKS:
        joined_bytes = cumulative[cuts[2:]] - cumulative[cuts[:-2]]
        del cuts[int(joined_bytes.argmin()) + 1]
    return cuts


def _with_huge_split(cuts: list[int], cumulative: Integers, crossing: Integers) -> list[int]:
    """Blocks with most of the bytes are cut where the fewest bytes cross."""
    done: list[int] = []
    todo = list(reversed(list(pairwise(cuts))))
    while todo:
        start, end = todo.pop()
        huge = cumulative[end] - cumulative[start] > _HUGE * cumulative[-1]
        place = _best_place(start, end, cumulative, crossing) if huge else None
        if place is not None:
            todo += [(place, end), (start, place)]
        else:
            done.append(start)
    return [*done, cuts[-1]]


def _best_place(start: int, end: int, cumulative: Integers, crossing: Integers) -> int | None:
    all_bytes = cumulative[end] - cumulative[start]
    sides = np.minimum(cumulative[start + 1 : end] - cumulative[start], cumulative[end] - cumulative[start + 1 : end])
    places = np.flatnonzero(sides >= all_bytes * _SIDE) + start + 1
    return int(places[crossing[places].argmin()]) if places.size else None


def _backward_starts(indexed: IndexedGraph, backward_start: int, block_of: Indices, count: int) -> list[int]:
    """Per block the first node of its backward; they fall.

    A node that reads a block's outputs belongs before that block's backward is over, and not before the backward of
    the blocks that have read what it reads; among the places that break the fewest of these rules, the last where the
    fewest bytes of gradients, but some, are handed over: what reads a boundary goes with the block that it leads to,
    whose backward has it anyway.
    """
    last_read, last_shared = _reads(indexed, backward_start, block_of)
    gradients = _gradient_bytes(indexed, backward_start)
    gradients[gradients == 0] = gradients.max() + 1
    starts = [backward_start] * count
    for k in reversed(range(count - 1)):
        too_early = np.concatenate(([0], np.cumsum((last_shared >= 0) & (last_shared <= k))))
        too_late = np.concatenate(([0], np.cumsum(last_read > k)))
        violations = too_early + too_late[-1] - too_late
        best = np.flatnonzero(violations == violations.min())
        starts[k] = max(starts[k + 1], backward_start + int(best[::-1][gradients[best][::-1].argmin()]))
    return starts


def _reads(indexed: IndexedGraph, backward_start: int, block_of: Indices) -> tuple[Indices, Indices]:
    """Per backward node the last block whose outputs it reads, and the last that reads these too; -1 for none."""
    forward, backward = range(backward_start), range(backward_start, indexed.count)
    last_reader = [max(int(block_of[r]) for r in (v, *indexed.readers[v]) if r in forward) for v in forward]
    last_read = [max((int(block_of[u]) for u in indexed.inputs[t] if u in forward), default=-1) for t in backward]
    last_shared = [max((last_reader[u] for u in indexed.inputs[t] if u in forward), default=-1) for t in backward]
    return np.array(last_read, dtype=np.intp), np.array(last_shared, dtype=np.intp)


def _gradient_bytes(indexed: IndexedGraph, start: int) -> Integers:
    """For every place of the backward nodes the bytes of their outputs that are read across it."""
    size = np.zeros(indexed.count - start + 1, dtype=np.int64)
    for v in range(start, indexed.count):
        if not indexed.is_output[v]:
            last = max(indexed.readers[v], default=v)
            size[v + 1 - start : last + 1 - start] += indexed.output_bytes[v]
    return size


def _blocks(
    indexed: IndexedGraph,
    rerunnable: Mask,
    backward_start: int,
    block_of: Indices,
    cuts: Sequence[int],
    starts: Sequence[int],
) -> list[Block]:
    count = len(cuts) - 1
    boundary: list[list[int]] = [[] for _ in range(count)]
    lasting: list[list[int]] = [[] for _ in range(count)]
    held = [0] * count
    for v in range(backward_start):
        block, readers = int(block_of[v]), [(int(block_of[r]), r >= backward_start) for r in indexed.readers[v]]
        other_blocks = [k for k, late in readers if late or k != block]
        far = any(k not in (block, block + 1) for k in other_blocks)
        if indexed.is_output[v] or far or (other_blocks and not rerunnable[v]):
            lasting[block].append(v)
            phases = [k for k, late in readers if late]
            until = 0 if indexed.is_output[v] else min([block, *phases])
            held[until] += int(indexed.output_bytes[v])
        elif block + 1 in other_blocks:
            boundary[block].append(v)
    ends = [indexed.count, *starts]
    return [
        Block(
            forward=range(cuts[k], cuts[k + 1]),
            backward=range(starts[k], ends[k]),
            entry=tuple(boundary[k - 1]) if k else (),
            boundary=tuple(boundary[k]),
            lasting=tuple(lasting[k]),
            lasting_bytes=held[k],
        )
        for k in range(count)
    ]
