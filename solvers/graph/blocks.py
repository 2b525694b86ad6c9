"""Cuts a training graph into a chain of blocks, and makes the menu of each: options to run it.

Blocks are consecutive forward nodes and the backward nodes that go with them. A cut is narrow where forward nodes read
only one output across it, apart from those that may last. Blocks lie between narrow cuts; where much crosses them there
is none, as long as blocks stay small. The backward nodes, in their own order, are cut where they stop reading what one
block made. What is read beyond the next block is *lasting*: it is never run again.

A menu goes from keeping all that its backward reads to keeping nothing but its entry.

Formulation: for every output v of the block that its backward can need, ``kept[v]`` says that v stays from forward to
backward and ``rerun[v]`` that it runs again in the backward, which finds its inputs kept or run again too. What the
block before and lasting outputs offer is there. The kept bytes are bounded; minimised are the seconds of what runs
again. One small program per bound gives a kept set; what runs again does so on demand, and all or some of it is held
until its last reader, the rest made again for each: each is an option of its own.

Guarantee: fewest seconds for the kept bytes within the block; peaks are worked out in exact bytes, not bounded. Blocks
that are the same but for their seconds, and these nearly, share the kept sets of the first of them.
Complexity: a program with two binaries per node for each of ten bounds and each distinct block. Units: bytes, seconds.

Paper: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
re-materialization in PyTorch" (2023), section 3.2, of which the budgets on a block's peaks are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from solvers.arrays import Indices, Integers
from solvers.graph.orders import IndexedGraph, peak_profile, runs_for
from solvers.highs import Program
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


def cut_into_blocks(indexed: IndexedGraph, largest_share: float) -> list[Block]:
    """Blocks in forward order, which together hold every node; one block where there is nothing to cut.

    ``largest_share``: of the forward's bytes in one block, where narrow cuts allow it.

    >>> from solvers.problem.examples import training_graph
    >>> indexed = IndexedGraph(training_graph(3))
    >>> for block in cut_into_blocks(indexed, 0.1):
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
    return _blocks(indexed, backward_start, block_of, cuts, [*starts, backward_start])


def first_backward_node(indexed: IndexedGraph) -> int:
    """The first backward node: as the labels say, or where they mix, the node after which most bytes lie idle."""
    backward = np.array([node.side == "backward" for node in indexed.graph.nodes])
    backward_start = int(backward.argmax()) if backward.any() else 0
    if backward_start and backward[backward_start:].all():
        return backward_start
    idle = peak_profile(indexed, range(indexed.count)) - indexed.working_bytes
    return int(idle.argmax()) + 1


def _forward_cuts(indexed: IndexedGraph, backward_start: int, largest_share: float) -> list[int]:
    """The first nodes of the blocks, and of the backward."""
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
    """Leaves out the cuts that most bytes cross, as long as no block grows larger than its share."""
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
        if indexed.is_output[v] or far or (other_blocks and not indexed.rerunnable[v]):
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


BUDGETS = 12  # bounds on the kept bytes, evenly from nothing to all
_HELD = (1.0, 0.7, 0.4, 0.2, 0.0)  # of the nodes, held once they run again: other shares make lower peaks
_ALIKE = 0.25  # of a block's seconds: measured times of the same ops differ by up to a fifth (benchmarks/problems)
_GAP = 3e-3  # of the programs: far below what the chain's model of a graph leaves out
_SCALE = 1e4  # what all of a block's nodes cost together in the program: far above HiGHS's absolute tolerances


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """One option to run a block; nodes are counted from the block's own first forward node, then its backward nodes.

    Attributes:
        kept: forward nodes that stay from the forward to the backward, beside lasting ones.
        kept_runs: what has to run so that ``kept`` is there.
        backward_runs: what runs in the backward, repeated forward nodes included.
        kept_bytes: of ``kept``, without the boundary.
        kept_output_bytes: of the boundary in ``kept``.
        forward_peak_bytes, recompute_peak_bytes, backward_peak_bytes: above what is alive when it starts.
    """

    kept: tuple[int, ...]
    kept_runs: tuple[int, ...]
    backward_runs: tuple[int, ...]
    kept_bytes: int
    kept_output_bytes: int
    forward_peak_bytes: int
    recompute_peak_bytes: int
    backward_peak_bytes: int


class BlockMenus:
    """Menus by block; blocks that are alike share one.

    Args:
        left_seconds: asked before each program; where no time is left a menu has its two ends only.

    Attributes:
        solved: how many distinct blocks there were to solve.
    """

    def __init__(self, indexed: IndexedGraph, left_seconds: Callable[[], float] = lambda: math.inf) -> None:
        self._indexed = indexed
        self._left_seconds = left_seconds
        self._known: dict[Any, list[tuple[Block, list[BlockOption]]]] = {}
        self.solved = 0

    def menu(self, block: Block) -> list[BlockOption]:
        """Options by falling kept bytes: the first keeps everything, the last nothing."""
        same_key = self._known.setdefault(block_key(self._indexed, block), [])
        for other, options in same_key:
            if self._nearly(block, other):
                return options
        options = _solve_block(self._indexed, block, self._left_seconds)
        self.solved += 1
        same_key.append((block, options))
        return options

    def _nearly(self, block: Block, other: Block) -> bool:
        seconds, others = (self._indexed.seconds[[*b.forward, *b.backward]] for b in (block, other))
        return bool(np.abs(seconds - others).sum() <= _ALIKE * min(seconds.sum(), others.sum()))


def node_of(block: Block, place: int) -> int:
    """The node that an option counts as ``place``."""
    forward = block.forward
    return forward[place] if place < len(forward) else block.backward[place - len(forward)]


def block_key(indexed: IndexedGraph, block: Block) -> Any:
    """All that a block's menu depends on but for seconds, whatever its nodes are called."""
    names = {v: place for place, v in enumerate((*block.forward, *block.backward))}
    outside: dict[int, Any] = {}
    entry, rows = set(block.entry), []
    for v in (*block.forward, *block.backward):
        for u in indexed.inputs[v]:
            if u not in names and u not in outside:
                outside[u] = (-1 - len(outside), u in entry, int(indexed.output_bytes[u]))
        inputs = tuple(sorted(names.get(u, outside[u][0] if u in outside else 0) for u in indexed.inputs[v]))
        sizes = (int(indexed.output_bytes[v]), int(indexed.transient_bytes[v]), _outlives_block(indexed, block, v))
        rows.append((*sizes, inputs))
    roles = tuple(tuple(names[v] for v in group) for group in (block.boundary, block.lasting))
    return len(block.forward), tuple(rows), tuple(outside.values()), roles


def _outlives_block(indexed: IndexedGraph, block: Block, v: int) -> bool:
    """Whether an output outlives the block's backward."""
    return bool(indexed.is_output[v]) or max(indexed.readers[v], default=v) >= block.backward.stop


def _solve_block(indexed: IndexedGraph, block: Block, left_seconds: Callable[[], float]) -> list[BlockOption]:
    lasting, forward = set(block.lasting), block.forward
    read = {u for t in block.backward for u in indexed.inputs[t] if u in forward and u not in lasting}
    inside = sorted(read - set(block.boundary))
    most_bytes = int(indexed.output_bytes[inside].sum())
    kept_sets = dict.fromkeys([tuple(sorted(read)), ()])
    for budget in np.linspace(0, most_bytes, BUDGETS, endpoint=False):
        if left_seconds() > 0:
            kept_sets[_best_kept(indexed, block, read, int(budget))] = None
    options = [_option(indexed, block, kept, held) for kept in kept_sets for held in _held_sets(indexed, block)]
    return _undominated(indexed, block, options)


def _best_kept(indexed: IndexedGraph, block: Block, read: set[int], budget_bytes: int) -> tuple[int, ...]:
    """The kept set within a bound that leaves the fewest seconds to run again."""
    program = Program()
    nodes = runs_to_make(indexed, block, read)
    all_seconds = float(indexed.seconds[nodes].sum()) or 1.0
    kept = {v: program.variable() for v in nodes}
    rerun = {v: program.variable(cost=float(indexed.seconds[v]) / all_seconds * _SCALE) for v in nodes}
    for v in nodes:
        for u in indexed.inputs[v]:
            if u in kept:
                program.row([(rerun[v], 1.0), (kept[u], -1.0), (rerun[u], -1.0)], upper=0.0)
    for v in read:
        program.row([(kept[v], 1.0), (rerun[v], 1.0)], lower=1.0)
    handed_on, unit = set(block.boundary), max(1, budget_bytes)
    program.row(
        [(kept[v], indexed.output_bytes[v] / unit) for v in nodes if v not in handed_on], upper=budget_bytes / unit
    )
    answer = program.solve(time_limit_seconds=1.0, relative_gap=_GAP)
    if answer.values is None:
        return ()
    return tuple(v for v in nodes if answer.values[kept[v]] > 0.5)


def runs_to_make(indexed: IndexedGraph, block: Block, wanted: Iterable[int]) -> list[int]:
    """The block's forward nodes that have to run so that ``wanted`` is alive, where nothing is kept."""
    alive = _available(indexed, block)
    return [run for v in sorted(wanted) for run in runs_for(indexed, alive, v)]


def _available(indexed: IndexedGraph, block: Block) -> set[int]:
    """The nodes that a recomputation finds alive: those of other blocks, and those that last."""
    outside = {u for v in block.forward for u in indexed.inputs[v] if u not in block.forward}
    return outside | set(block.lasting)


def _held_sets(indexed: IndexedGraph, block: Block) -> list[set[int]]:
    """All of the block's forward nodes, then fewer and fewer, those left that take longest per byte."""
    nodes = np.array(block.forward)
    nodes = nodes[np.argsort(-indexed.seconds[nodes] / np.maximum(1, indexed.output_bytes[nodes]), kind="stable")]
    return [set(nodes[: round(share * nodes.size)].tolist()) for share in _HELD]


def _backward_runs(indexed: IndexedGraph, block: Block, kept: Sequence[int], held: set[int]) -> list[int]:
    """The backward nodes, each after what has to run again for it; unless that is in ``held``, for it alone."""
    available = _available(indexed, block) | set(kept)
    alive, runs = set(available), []
    for t in block.backward:
        for u in indexed.inputs[t]:
            if u in block.forward:
                runs += runs_for(indexed, alive, u)
        runs.append(t)
        alive = {v for v in alive if v in available or v in held}
    return runs


def _option(indexed: IndexedGraph, block: Block, kept: Sequence[int], held: set[int]) -> BlockOption:
    boundary, output_bytes = set(block.boundary), indexed.output_bytes
    backward = _backward_runs(indexed, block, kept, held)
    kept_runs = runs_to_make(indexed, block, kept)
    handed = {u for t in block.backward for u in indexed.inputs[t] if u >= block.forward.stop}
    handed = {u for u in handed if u < block.backward.start and not _outlives_block(indexed, block, u)}
    staying = {t for t in block.backward if _outlives_block(indexed, block, t)}
    lasting = {v for v in block.lasting if indexed.readers[v] and min(indexed.readers[v]) < block.backward.stop}
    place = {v: k for k, v in enumerate((*block.forward, *block.backward))}
    return BlockOption(
        kept=tuple(place[v] for v in kept),
        kept_runs=tuple(place[v] for v in kept_runs),
        backward_runs=tuple(place[v] for v in backward),
        kept_bytes=sum(int(output_bytes[v]) for v in kept if v not in boundary),
        kept_output_bytes=sum(int(output_bytes[v]) for v in kept if v in boundary),
        forward_peak_bytes=peak_bytes(indexed, block.forward, set(), {*kept, *boundary, *lasting}),
        recompute_peak_bytes=peak_bytes(indexed, kept_runs, set(), set(kept)),
        backward_peak_bytes=peak_bytes(indexed, backward, {*kept, *handed}, staying),
    )


def peak_bytes(indexed: IndexedGraph, runs: Sequence[int], before: set[int], after: set[int]) -> int:
    """The most bytes above those alive at the start while ``runs`` go on, each output freed after its last read.

    ``before`` is alive at the start and may be freed; what is in ``after`` stays. What else is read is left out.

    >>> from solvers.problem.graph import Graph, Node
    >>> a, b = Node(name="a", seconds=1, output_bytes=4), Node(name="b", seconds=1, output_bytes=2, inputs=("a",))
    >>> c = Node(name="c", seconds=1, output_bytes=3, inputs=("b",))
    >>> peak_bytes(IndexedGraph(Graph(nodes=(a, b, c))), [1, 2], {0}, {2})
    2
    """
    latest_run: dict[int, int] = dict.fromkeys(before, -1)
    last_read = {(v, -1): -1 for v in before}
    for place, v in enumerate(runs):
        for u in indexed.inputs[v]:
            if u in latest_run:
                last_read[u, latest_run[u]] = place
        latest_run[v] = place
        last_read[v, place] = place
    freed = [0] * (len(runs) + 1)  # bytes after each run; the last entry is before all of them
    for (v, run), place in last_read.items():
        if v not in after or latest_run[v] != run:
            freed[place] += int(indexed.output_bytes[v])
    alive, peak = -freed[-1], 0
    for place, v in enumerate(runs):
        alive += int(indexed.output_bytes[v])
        peak = max(peak, alive + int(indexed.transient_bytes[v]))
        alive -= freed[place]
    return peak


def _undominated(indexed: IndexedGraph, block: Block, options: list[BlockOption]) -> list[BlockOption]:
    """Options that no other one is at least as good as in everything; the one that keeps everything first."""
    first, *others = [(_score(indexed, block, option), option) for option in options]
    chosen: dict[tuple[float, ...], BlockOption] = {}
    for score, option in [first, *sorted(others, key=lambda item: item[0])]:
        if not any(all(a <= b for a, b in zip(better, score, strict=True)) for better in chosen):
            chosen[score] = option
    return [first[1], *sorted(list(chosen.values())[1:], key=lambda option: -option.kept_bytes)]


def _score(indexed: IndexedGraph, block: Block, option: BlockOption) -> tuple[float, ...]:
    seconds = float(sum(indexed.seconds[node_of(block, place)] for place in option.backward_runs))
    held = option.kept_bytes + option.kept_output_bytes
    return seconds, option.kept_bytes, held, held + option.backward_peak_bytes, option.forward_peak_bytes
