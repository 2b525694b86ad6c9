"""Exhaustive search for graphs of a few nodes: a shortest path over every state that a schedule can be in.

Formulation: a state is how many nodes have had their first run and which outputs are alive, as a bit mask; an edge
is the next first run (free of charge: it is in every schedule) or a repeated run of any dead node whose inputs are
alive (its seconds). Outputs are freed only when a run does not fit beside them, and then every smallest set of them
that makes room is tried. A* with the seconds of all dead nodes that are still needed, directly or to run another
one; a state is dropped where one at least as cheap has the same first runs behind it and more alive.
Guarantee: the fastest of all schedules; no schedule means that there is none.
Complexity: exponential, at most n 2^n states of n nodes. Units: bytes and seconds.
Paper: Hart, Nilsson, Raphael, "A formal basis for the heuristic determination of minimum cost paths" (1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import reduce
from itertools import accumulate
from math import inf
from operator import or_
from typing import NamedTuple

from solvers.graph.orders import IndexedGraph, peak_profile
from solvers.problem.deadline import check_deadline
from solvers.problem.plain_data import check_size

MOST_NODES = 12


def solve(indexed: IndexedGraph, budget_bytes: int) -> tuple[int, ...] | None:
    """The fastest order of runs within the budget; None where there is none.

    Raises:
        ValueError: the graph has more nodes than can be searched.

    >>> from solvers.problem.examples import late_reader
    >>> indexed = IndexedGraph(late_reader())
    >>> [solve(indexed, budget) for budget in (9, 8, 7)]
    [(0, 1, 2, 3), (0, 1, 2, 0, 3), None]
    """
    return _GraphSearch(indexed).order(budget_bytes)


def smallest_peak(indexed: IndexedGraph) -> int:
    """The smallest budget in bytes that any schedule fits in.

    Raises:
        ValueError: the graph has more nodes than can be searched.
    """
    search = _GraphSearch(indexed)
    low, high = int(indexed.working_bytes.max()), int(peak_profile(indexed, range(indexed.count)).max())
    while low < high:
        middle = (low + high) // 2
        if search.order(middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


class _GraphState(NamedTuple):
    estimate: float  # extra seconds of the cheapest path to the end through here, at least
    undone: int  # first runs still to come: among equals the state furthest along goes first
    alive: int
    extra: float  # seconds of the repeated runs so far
    alive_bytes: int
    came_from: _GraphState | None
    node: int


class _GraphSearch:
    """One graph, as bit masks; ``order`` answers one budget."""

    def __init__(self, indexed: IndexedGraph) -> None:
        check_size("exhaustive", indexed.count, MOST_NODES, "nodes", "another method")
        self.count = indexed.count
        self.inputs = [sum(1 << i for i in inputs) for inputs in indexed.inputs]
        self.output_bytes = [int(size) for size in indexed.output_bytes]
        self.own_bytes = [int(size) for size in indexed.output_bytes + indexed.transient_bytes]
        self.resident = indexed.graph.resident_bytes
        self.seconds = [float(seconds) for seconds in indexed.seconds]
        self.once = sum(1 << v for v in range(self.count) if indexed.once[v])
        self.outputs = sum(1 << v for v in range(self.count) if indexed.is_output[v])
        self.useful = reduce(or_, self.inputs, self.outputs)  # a repeated run of others helps nobody
        self.needed = [self._needed_nodes(undone) for undone in range(self.count + 1)]

    def order(self, budget_bytes: int) -> tuple[int, ...] | None:
        """The cheapest order of runs within the budget; None where there is none."""
        queue = [_GraphState(0.0, self.count, 0, 0.0, self.resident, None, -1)]
        closed: list[list[tuple[int, float]]] = [[] for _ in range(self.count + 1)]
        while queue:
            check_deadline()
            state = heapq.heappop(queue)
            if any(not state.alive & ~alive and extra <= state.extra for alive, extra in closed[state.undone]):
                continue
            if not state.undone and not self.outputs & ~state.alive:
                return _trace(state)
            closed[state.undone].append((state.alive, state.extra))
            for after in self._after(state, budget_bytes):
                heapq.heappush(queue, after)
        return None

    def _needed_nodes(self, undone: int) -> int:
        """Nodes with a first run behind them that one to come reads, or the end."""
        done = self.count - undone
        return reduce(or_, self.inputs[done:], self.outputs) & ((1 << done) - 1)

    def _missing_seconds(self, undone: int, alive: int) -> float:
        """Seconds of the dead nodes that have to run again before the end."""
        missing, total = self.needed[undone] & ~alive, 0.0
        while missing:
            v = missing.bit_length() - 1
            total += inf if self.once >> v & 1 else self.seconds[v]
            missing = (missing ^ (1 << v)) | self.inputs[v] & ~alive
        return total

    def _after(self, state: _GraphState, budget_bytes: int) -> Iterator[_GraphState]:
        next_first, alive = self.count - state.undone, state.alive
        for v in range(min(next_first + 1, self.count)):
            bit, inputs = 1 << v, self.inputs[v]
            if alive & bit or inputs & ~alive or not (v == next_first or self.useful & bit & ~self.once):
                continue
            undone = state.undone - (v == next_first)
            extra = state.extra + (0.0 if v == next_first else self.seconds[v])
            excess = state.alive_bytes + self.own_bytes[v] - budget_bytes
            for freed, freed_bytes in self._frees(alive & ~inputs, excess):
                remaining = alive & ~freed | bit
                estimate = extra + self._missing_seconds(undone, remaining)
                if estimate == inf:  # Something is gone that must not run again.
                    continue
                alive_bytes = state.alive_bytes - freed_bytes + self.output_bytes[v]
                yield _GraphState(estimate, undone, remaining, extra, alive_bytes, state, v)

    def _frees(self, freeable: int, excess: int) -> Iterator[tuple[int, int]]:
        """Every set of outputs that frees at least ``excess`` bytes and would not without any one of its members."""
        if excess <= 0:
            yield 0, 0
            return
        items = sorted(
            (self.output_bytes[v], v)
            for v in range(freeable.bit_length())
            if freeable >> v & 1 and self.output_bytes[v]
        )
        rest = [0, *accumulate(size for size, _ in items)]
        stack = [(len(items), 0, 0)]
        while stack:  # from the largest on: the last one taken is the smallest, so none could be left out
            count, freed, freed_bytes = stack.pop()
            if freed_bytes >= excess:
                yield freed, freed_bytes
            elif freed_bytes + rest[count] >= excess:
                size, v = items[count - 1]
                stack.append((count - 1, freed, freed_bytes))
                stack.append((count - 1, freed | 1 << v, freed_bytes + size))


def _trace(state: _GraphState) -> tuple[int, ...]:
    nodes: list[int] = []
    step: _GraphState | None = state
    while step is not None and step.came_from is not None:
        nodes.append(step.node)
        step = step.came_from
    return tuple(reversed(nodes))
