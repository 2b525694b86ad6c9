"""The menu of a block: options to run it, from keeping all that its backward reads to keeping nothing but its entry.

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
from typing import Any

import numpy as np

from solvers.graph.block_partition import Block
from solvers.graph.liveness import IndexedGraph, runs_for
from solvers.highs import Program

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
    """What a repeated run finds alive: what other blocks made, and what lasts."""
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
