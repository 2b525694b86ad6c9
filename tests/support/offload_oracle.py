"""Exhaustive search for tiny chains with a link: a shortest path over all states of a schedule and its copies.

Each state of ``solvers.chain.exhaustive`` is paired with where every offload unit of what is held is (here, leaving,
away, coming) and with the seconds until each copy on its way, and each engine, is done. Times count from the state, so
that equal situations are one; they are exact where seconds and rates are powers of two apart.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from solvers import Chain, Link, Problem
from solvers.chain.exhaustive import SearchState, edges_from, live_bytes

UnitTransfer = tuple[int, int, str, float]  # stage, number, where it is, seconds until its copy is done


class _Situation(NamedTuple):
    state: SearchState
    offload_units: tuple[UnitTransfer, ...]  # those that are not simply here
    out_seconds: float  # until the engine to the host is free
    back_seconds: float


def fastest_seconds(problem: Problem) -> float | None:
    """Seconds of the fastest schedule with or without copies; None where none fits."""
    chain, link = problem.chain, problem.link
    assert link is not None
    stages = len(chain.stages)
    if chain.optimizer_peak_bytes > problem.budget_bytes:
        return None
    start = _Situation(SearchState(frozenset(), (-1,) * stages, frozenset(), -1, stages - 1), (), 0.0, 0.0)
    tie = count()
    queue: list[tuple[float, int, _Situation]] = [(0.0, next(tie), start)]
    done: set[_Situation] = set()
    while queue:
        seconds, _, situation = heapq.heappop(queue)
        if situation in done:
            continue
        done.add(situation)
        if situation.state.pending < 0:
            return seconds
        for step_seconds, after in _steps(chain, link, situation, problem.budget_bytes):
            if after not in done:
                heapq.heappush(queue, (seconds + step_seconds, next(tie), after))
    return None


def _steps(chain: Chain, link: Link, situation: _Situation, budget: int) -> Iterator[tuple[float, _Situation]]:
    yield from _runs(chain, situation, budget)
    transfers = {(stage, i): (phase, left) for stage, i, phase, left in situation.offload_units}
    for (stage, i), size in _holdings(chain, situation.state).items():
        phase, left = transfers.get((stage, i), ("here", 0.0))
        others = tuple(p for p in situation.offload_units if p[:2] != (stage, i))
        if phase == "here" and (link.host_bytes is None or _hosted(chain, situation) + size <= link.host_bytes):
            end = situation.out_seconds + link.to_host_seconds(size)
            yield 0.0, situation._replace(offload_units=_sorted((*others, (stage, i, "leaving", end))), out_seconds=end)
        elif phase == "leaving":
            yield left, _later(situation._replace(offload_units=_sorted((*others, (stage, i, "away", 0.0)))), left)
        elif phase == "away" and _live(chain, situation) + size <= budget:
            end = situation.back_seconds + link.to_device_seconds(size)
            yield 0.0, situation._replace(offload_units=_sorted((*others, (stage, i, "coming", end))), back_seconds=end)


def _runs(chain: Chain, situation: _Situation, budget: int) -> Iterator[tuple[float, _Situation]]:
    away = live_bytes(chain, situation.state) - _live(chain, situation)
    for edge in edges_from(chain, situation.state):
        before = live_bytes(chain, edge.before) - away
        if max(before + edge.peak_bytes, live_bytes(chain, edge.state) - away) > budget:
            continue
        if edge.action.kind in ("free", "forward") and _input_is_away(situation, edge.action.stage + 1):
            continue
        used = [p for p in situation.offload_units if p[0] == edge.action.stage and edge.action.kind != "free"]
        if any(p[2] != "coming" for p in used):
            continue
        wait = max((p[3] for p in used), default=0.0)
        rest = situation._replace(
            state=edge.state, offload_units=tuple(p for p in situation.offload_units if p not in used)
        )
        yield wait + edge.seconds, _later(rest, wait + edge.seconds)


def _input_is_away(situation: _Situation, reader: int) -> bool:
    """Whether a stage that waits has parts of its input in host memory, or under way."""
    return any(p[0] == reader and situation.state.kept[reader] < 0 for p in situation.offload_units)


def _later(situation: _Situation, seconds: float) -> _Situation:
    units = tuple((stage, i, phase, max(0.0, left - seconds)) for stage, i, phase, left in situation.offload_units)
    return situation._replace(
        offload_units=units,
        out_seconds=max(0.0, situation.out_seconds - seconds),
        back_seconds=max(0.0, situation.back_seconds - seconds),
    )


def _sorted(units: tuple[UnitTransfer, ...]) -> tuple[UnitTransfer, ...]:
    return tuple(sorted(units))


def _holdings(chain: Chain, state: SearchState) -> dict[tuple[int, int], int]:
    """Sizes of all offload units that stages hold."""
    sizes: dict[tuple[int, int], int] = {}
    for k in range(min(state.reached, state.pending) + 1):
        stage = chain.stages[k]
        if state.kept[k] >= 0:
            units = stage.options[state.kept[k]].offload_units
        else:
            units = stage.offload_units if k == 0 or k - 1 in state.alive else ()
        sizes.update({(k, i): size for i, size in enumerate(units)})
    return sizes


def _hosted(chain: Chain, situation: _Situation) -> int:
    sizes = _holdings(chain, situation.state)
    return sum(sizes[p[:2]] for p in situation.offload_units)


def _live(chain: Chain, situation: _Situation) -> int:
    sizes = _holdings(chain, situation.state)
    return live_bytes(chain, situation.state) - sum(sizes[p[:2]] for p in situation.offload_units if p[2] == "away")
