"""Merging of orders of runs: the best selection from all that several of them run again, by the template program.

Formulation: a template is the shortest order found that contains the best known order and some others, which need not
fit the budget. More others are taken after rounds that end early, fewer after rounds that run out of time. Towards a
smaller peak the same is done with the order of the smallest peak, where no order fits the budget yet.

In the template program first runs stand in the template and happen. A binary says for each repeated run whether it
happens, and one for each stretch between two events of a node (its runs and its reads) whether its output is alive
there. What is alive was alive or made before; what happens finds its inputs alive; at each run everything alive, its
own output and its transient fit the budget.

Guarantee: the program's optimum is the fastest schedule whose runs are a part of the template, or the one with the
smallest peak, exact in bytes; it bounds no other schedule. So merging is never worse than the order it starts from, and
proves nothing. Complexity: one integer program a round, with O(V + reads) binaries and a row of what may be alive per
run. Units: bytes and seconds.
Source: solution merging after Applegate, Bixby, Chvatal, Cook, "Finding tours in the TSP" (1999); the retention
intervals of Bartan et al., "Moccasin" (2023), section 2, on runs in a fixed order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from solvers.arrays import Floats
from solvers.graph.orders import Incumbent, IndexedGraph
from solvers.highs import Program
from solvers.problem.deadline import check_deadline

_SCALE = 1e4  # what all first runs cost together in the program: far above HiGHS's absolute tolerances
_SECONDS_BESIDE = 1e-3  # of the peak: of orders with the same peak a fast one


def template_of(
    indexed: IndexedGraph, orders: Sequence[Sequence[int]], window: tuple[int, int] = (0, sys.maxsize)
) -> list[int]:
    """The shortest order found that contains the first one, and the others before the first runs of a window.

    >>> from solvers.problem.graph import Graph, Node
    >>> a, b = Node(name="a", seconds=1, output_bytes=1), Node(name="b", seconds=1, output_bytes=1, inputs=("a",))
    >>> template_of(IndexedGraph(Graph(nodes=(a, b))), [[0, 1, 0], [0, 0, 1], [0, 1]])
    [0, 0, 1, 0]
    """
    merged = _gaps(indexed, orders[0])
    for order in orders[1:]:
        pairs = enumerate(zip(merged, _gaps(indexed, order), strict=True))
        merged = [_supersequence(a, b) if window[0] <= t <= window[1] else a for t, (a, b) in pairs]
    template: list[int] = []
    for t, gap in enumerate(merged):
        template += [*gap, t] if t < indexed.count else gap
    return template


def _gaps(indexed: IndexedGraph, order: Sequence[int]) -> list[list[int]]:
    """The recomputations before each first run, and after the last one."""
    gaps: list[list[int]] = [[]]
    for v in order:
        if v == len(gaps) - 1 and len(gaps) <= indexed.count:
            gaps.append([])
        else:
            gaps[-1].append(v)
    return gaps


def _supersequence(a: list[int], b: list[int]) -> list[int]:
    """A shortest common supersequence, by dynamic programming."""
    if not a or not b or a == b:
        return a or b
    longest = np.zeros((len(a) + 1, len(b) + 1), dtype=np.int32)
    for i in reversed(range(len(a))):
        check_deadline()
        for j in reversed(range(len(b))):
            longest[i, j] = longest[i + 1, j + 1] + 1 if a[i] == b[j] else max(longest[i + 1, j], longest[i, j + 1])
    merged, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            merged.append(a[i])
            i, j = i + 1, j + 1
        elif longest[i + 1, j] >= longest[i, j + 1]:
            merged.append(a[i])
            i += 1
        else:
            merged.append(b[j])
            j += 1
    return merged + a[i:] + b[j:]


class TemplateProgram:
    """The program of one template.

    Args:
        smallest_peak: the peak is the objective, below the budget; otherwise the seconds are.

    Attributes:
        program: to solve; its objective is the whole time, in units of ``unit_seconds``, or the peak's share of the
            budget with a thousandth of the time beside it.
    """

    def __init__(
        self, indexed: IndexedGraph, budget_bytes: int, template: list[int], *, smallest_peak: bool = False
    ) -> None:
        self.indexed = indexed
        self.template = template
        self.program = Program()
        self.unit_seconds = (float(indexed.seconds.sum()) or 1.0) / _SCALE
        self._room = budget_bytes - indexed.graph.resident_bytes
        self._runs: list[int] = []
        self._alive: list[list[tuple[int, int]]] = [[] for _ in template]  # per place: (variable, bytes)
        # Per node, in order: the place that a stretch follows, whether the node itself runs there, and its variable.
        self._stretches: list[list[tuple[int, bool, int]]] = [[] for _ in range(indexed.count)]
        seen: set[int] = set()
        for v in template:
            first = v not in seen
            seen.add(v)
            cost = float(indexed.seconds[v]) / self.unit_seconds
            cost *= _SECONDS_BESIDE if smallest_peak else 1.0
            self._runs.append(self.program.variable(cost=cost, lower=float(first)))
        self._peak = self.program.variable(cost=_SCALE, integral=False) if smallest_peak else None
        self._make_stretches()
        self._make_memory_rows()

    def _make_stretches(self) -> None:
        """Variables between the events of each node, and what they follow from."""
        events: list[list[tuple[int, bool]]] = [[] for _ in range(self.indexed.count)]
        for place, v in enumerate(self.template):
            for u in self.indexed.inputs[v]:
                events[u].append((place, False))
            events[v].append((place, True))
        for v, node_events in enumerate(events):
            self._make_node_stretches(v, node_events)

    def _make_node_stretches(self, v: int, events: list[tuple[int, bool]]) -> None:
        program, size, end = self.program, int(self.indexed.output_bytes[v]), len(self.template)
        before: int | None = None  # the variable of the stretch that ends at this event
        for (place, is_run), following in zip(events, [*(p for p, _ in events[1:]), end], strict=True):
            if not is_run:
                assert before is not None
                program.row([(self._runs[place], 1.0), (before, -1.0)], upper=0.0)
            after = program.variable(lower=float(following == end and bool(self.indexed.is_output[v])))
            sources = [before] if before is not None else []
            sources += [self._runs[place]] if is_run else []
            program.row([(after, 1.0), *((source, -1.0) for source in sources)], upper=0.0)
            if size:
                for between in range(place + 1, following + (following < end)):
                    self._alive[between].append((after, size))
            self._stretches[v].append((place, is_run, after))
            before = after

    def _make_memory_rows(self) -> None:
        for place, v in enumerate(self.template):
            own_bytes = int(self.indexed.output_bytes[v] + self.indexed.transient_bytes[v])
            # The stretch that ends where v itself runs again is not alive beside the new output.
            terms = [*self._alive[place], (self._runs[place], own_bytes)]
            if self._peak is None and sum(size for _, size in terms) <= self._room:
                continue
            scaled = [(variable, size / max(1, self._room)) for variable, size in terms]
            if self._peak is None:
                self.program.row(scaled, upper=1.0)
            else:
                self.program.row([*scaled, (self._peak, -1.0)], upper=0.0)

    def order(self, values: Floats) -> list[int]:
        """The runs that happen."""
        return [v for v, run in zip(self.template, self._runs, strict=True) if values[run] > 0.5]

    def encode(self, order: Sequence[int]) -> Floats | None:
        """An order as a solution; None where it is no part of the template."""
        values, place = np.zeros(len(self.program.costs)), 0
        if self._peak is not None:
            values[self._peak] = 1.0
        for v in order:
            while place < len(self.template) and self.template[place] != v:
                place += 1
            if place == len(self.template):
                return None
            values[self._runs[place]] = 1.0
            place += 1
        for v, stretches in enumerate(self._stretches):
            wanted = bool(self.indexed.is_output[v])
            for place, is_run, after in reversed(stretches):
                values[after] = float(wanted)
                if values[self._runs[place]] > 0.5:
                    wanted = not is_run
        return values


ROUND_SECONDS = 4.0  # a template that takes longer is too large
WHOLE_NODES = 800  # graphs with more are merged window by window: templates of 400 nodes take 0.3 to 4 s
_PLACES_A_SECOND = 1500  # a template's rows grow with the square of its places: 5,500 of them took 9 s to build
_BUILD_SHARE = 0.3  # of the time left, for building a template's program
_QUICK_SECONDS = 1.0  # a template that takes less may be larger


class OrderMerging:
    """Rounds on one search; ``step`` makes one.

    Args:
        smallest_peak: start from the order with the smallest peak and lower that; otherwise from the fastest one that
            fits, of which there has to be one.
    """

    def __init__(self, incumbent: Incumbent, *, smallest_peak: bool = False) -> None:
        self.incumbent = incumbent
        self._smallest_peak = smallest_peak
        self._rng = np.random.default_rng(0)
        self._others = 2
        self._share = min(1.0, WHOLE_NODES / incumbent.indexed.count)  # of the first runs, in one window
        self._last_seconds = 0.0

    def step(self) -> None:
        """Merge the best order with some of the others seen; without others there is nothing to do."""
        incumbent, peak = self.incumbent, self._smallest_peak
        best = incumbent.smallest if peak else incumbent.order
        assert best is not None
        others = [order for order in incumbent.seen if order != best]
        before = incumbent.left_seconds
        if before < self._last_seconds:
            incumbent.stop()  # no time for another round
        if not others or incumbent.done:
            return
        picks = self._rng.choice(len(others), size=min(self._others, len(others)), replace=False)
        window = self._draw_window()
        template = template_of(incumbent.indexed, [best, *(others[int(pick)] for pick in picks)], window)
        if (len(template) / _PLACES_A_SECOND) ** 2 > _BUILD_SHARE * before:
            self._adapt(solved=False)
            return
        budget_bytes = incumbent.smallest_bytes if peak else incumbent.budget_bytes
        program = TemplateProgram(incumbent.indexed, budget_bytes, template, smallest_peak=peak)
        answer = program.program.solve(
            time_limit_seconds=min(ROUND_SECONDS, before), relative_gap=incumbent.gap / 10, start=program.encode(best)
        )
        self._last_seconds = before - incumbent.left_seconds
        self._adapt(solved=answer.status == "optimal")
        if answer.values is not None:
            incumbent.offer(program.order(answer.values), "merging")

    def _draw_window(self) -> tuple[int, int]:
        count = self.incumbent.indexed.count
        size = round(self._share * (count + 1))
        start = int(self._rng.integers(0, count + 2 - size))
        return start, start + size

    def _adapt(self, *, solved: bool) -> None:
        """Larger templates after quick rounds, smaller ones after those that ran out of time: windows first."""
        if not solved and self._others > 1:
            self._others -= 1
        elif not solved:
            self._share = max(0.05, self._share * 0.7)
        elif self._last_seconds < _QUICK_SECONDS and self._share < 1.0:
            self._share = min(1.0, self._share * 1.3)
        elif self._last_seconds < _QUICK_SECONDS:
            self._others += 1
