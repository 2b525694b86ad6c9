"""What no program of a captured stage can beat: a bound on the time of every plan, whatever programs it uses.

Formulation: of what a call's forward makes and its backward reads, each storage is kept or its op runs again, for which
what that op reads is kept or made again in turn. For a price per byte, the least of seconds and paid bytes is a linear
program, whose value falls short of that of every program. As a function of the price it is concave, so between two
prices it lies above the chord: each chord stands for a stage that keeps so many bytes for so many seconds. A chain with
these in the place of its programs is no slower than one with any programs at all.

Source: the min-cut of Zheng et al. ("AOTAutograd", PyTorch); Everett (1963) for prices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from profiler.program_replay import call_replay
from profiler.records import MenuRecord
from profiler.step_graph import StepGraph, runs_once
from solvers import Chain
from solvers.highs import Program
from solvers.problem.chain import Option

_PRICES = 10
_SECONDS = 2.0  # for each program
_TOLERANCE = 1e-6  # relative, of HiGHS


class LeastCost(NamedTuple):
    """Bytes kept and seconds of what runs again; no program lies below all of them, whatever a byte costs."""

    kept_bytes: int
    seconds: float


def chain_with_any_programs(chain: Chain, numbers: Sequence[int], menus: Sequence[MenuRecord]) -> Chain:
    """The chain where captured stages have programs that no other ones beat: for bounds, not to be carried out.

    Args:
        chain: whose options are keeping everything, and those of the menus.
        numbers: of each stage that of its menu; -1 for none.
        menus: of the stages.

    Returns:
        The chain itself where no stage is captured.
    """
    if all(menu.once is None for menu in menus):
        return chain
    stages = list(chain.stages)
    for k, number in enumerate(numbers):
        if number >= 0 and menus[number].once is not None:
            stages[k] = replace(chain.stages[k], options=_any_programs(chain.stages[k].options, menus[number]))
    return replace(chain, stages=tuple(stages))


def _any_programs(options: Sequence[Option], menu: MenuRecord) -> tuple[Option, ...]:
    """Keeping everything, what is no program, and the programs that none beats."""
    once = menu.once
    assert once is not None and once.runs is not None and menu.graph is not None
    replayed = call_replay(menu.graph, once.runs)
    measured = options[1 + menu.options.index(once)]
    pace = once.backward_seconds / replayed.backward_seconds if replayed.backward_seconds > 0 else 1.0
    always_bytes = options[0].kept_bytes - once.freed_bytes - replayed.kept_bytes
    least = [
        replace(
            measured,
            name="any program",
            backward_seconds=measured.backward_seconds + pace * cost.seconds,
            kept_bytes=always_bytes + cost.kept_bytes,
            kept_output_bytes=0,
            forward_peak_bytes=0,
            backward_peak_bytes=0,
            recompute_peak_bytes=0,
        )
        for cost in least_costs(menu.graph)
    ]
    others = [option for option, record in zip(options[1:], menu.options, strict=True) if record.runs is None]
    return (options[0], *others, *least)


@functools.lru_cache(maxsize=64)
def least_costs(graph: StepGraph) -> tuple[LeastCost, ...]:
    """What no program of a call beats.

    >>> from profiler.step_graph import StepOp, StepStorage
    >>> made = tuple(StepStorage(size_bytes=size) for size in (4, 2))
    >>> ops = (StepOp(name="a", op="a", makes=(0,), seconds=1.0), StepOp(name="b", op="b", makes=(1,), seconds=1.0),
    ...        StepOp(name="c", op="c", side="backward", reads=(0, 1)))
    >>> costs = least_costs(StepGraph(ops=ops, storages=made, resident_bytes=0))
    >>> min(cost.seconds + 0.1 * cost.kept_bytes for cost in costs) <= 0.6
    True
    """
    forward = [op for op in graph.ops if op.side == "forward"]
    ratios = [
        op.seconds / size_bytes
        for op in forward
        if op.seconds > 0 and (size_bytes := sum(graph.storages[s].size_bytes for s in op.makes)) > 0
    ]
    least = _LeastPriced(graph)
    least_bytes = least.value(0.0, 1.0)
    if not ratios:
        return (LeastCost(int(least_bytes), 0.0),)
    prices = [0.0, *np.geomspace(min(ratios) / 2, 2 * sum(op.seconds for op in forward), _PRICES)]
    values = [0.0, *(least.value(1.0, price) for price in prices[1:])]
    chords = [LeastCost(int(least_bytes), max(0.0, values[-1] - prices[-1] * least_bytes))]
    for k in range(1, len(prices)):
        slope = (values[k] - values[k - 1]) / (prices[k] - prices[k - 1])
        chords.append(LeastCost(int(slope), max(0.0, values[k] - prices[k] * slope)))
    return tuple(chords)


class _LeastPriced:
    """The linear program of a call; its rows are the same at every price."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        once = call_replay(graph, runs_once(graph))
        self._most_seconds, self._most_bytes = max(once.seconds, 1e-9), max(once.kept_bytes, 1)
        self._program = Program()
        self._seconds: list[float] = []  # of each variable, and bytes
        self._bytes: list[int] = []
        self._maker = {s: k for k, op in enumerate(graph.ops) if op.side == "forward" for s in op.makes}
        self._keep = {
            s: self._variable(0.0, 0 if storage.returned else storage.size_bytes)
            for s, storage in enumerate(graph.storages)
            if s in self._maker
        }
        self._again = {
            k: self._variable(op.seconds, op.state_bytes) for k, op in enumerate(graph.ops) if op.side == "forward"
        }
        for k, op in enumerate(graph.ops):
            if op.side == "forward" and op.once_reason:
                self._program.fix(self._again[k], 0.0)
            for storage in (s for s in op.reads if s in self._keep):
                if op.side == "backward":
                    self._program.row(self._available(storage), lower=1.0)
                else:
                    self._program.row([*self._available(storage), (self._again[k], -1.0)], lower=0.0)

    def value(self, per_second: float, per_byte: float) -> float:
        """The least of priced seconds and bytes that a program takes, or less."""
        scale = per_second * self._most_seconds + per_byte * self._most_bytes
        priced = zip(self._seconds, self._bytes, strict=True)
        costs = [(per_second * seconds + per_byte * size_bytes) / scale for seconds, size_bytes in priced]
        self._program.costs = costs
        answer = self._program.solve(time_limit_seconds=_SECONDS)
        if answer.status != "optimal" or answer.values is None:
            return 0.0
        value = sum(cost * x for cost, x in zip(costs, answer.values, strict=True)) * scale
        return max(0.0, float(value) * (1 - _TOLERANCE) - _TOLERANCE * scale * 1e-3)

    def _variable(self, seconds: float, size_bytes: int) -> int:
        self._seconds.append(seconds)
        self._bytes.append(size_bytes)
        return self._program.variable(integral=False)

    def _available(self, storage: int) -> list[tuple[int, float]]:
        maker = self._maker[storage]
        made_again = storage not in self._graph.ops[maker].once_makes
        return [(self._keep[storage], 1.0), *([(self._again[maker], 1.0)] if made_again else [])]
