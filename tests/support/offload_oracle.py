"""The oracle for tiny chains with a link: a shortest path over everything that a schedule and its copies can be in.

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
from solvers.chain.exhaustive import _bytes_of, _edges, _State

Parcel = tuple[int, int, str, float]  # stage, number, where it is, seconds until its copy is done


class _Place(NamedTuple):
    state: _State
    offload_units: tuple[Parcel, ...]  # those that are not simply here
    out_seconds: float  # until the engine to the host is free
    back_seconds: float


def fastest_seconds(problem: Problem) -> float | None:
    """Seconds of the fastest schedule with or without copies; None where none fits."""
    chain, link = problem.chain, problem.link
    assert link is not None
    stages = len(chain.stages)
    if chain.optimizer_peak_bytes > problem.budget_bytes:
        return None
    start = _Place(_State(frozenset(), (-1,) * stages, frozenset(), -1, stages - 1), (), 0.0, 0.0)
    tie = count()
    queue: list[tuple[float, int, _Place]] = [(0.0, next(tie), start)]
    done: set[_Place] = set()
    while queue:
        seconds, _, place = heapq.heappop(queue)
        if place in done:
            continue
        done.add(place)
        if place.state.pending < 0:
            return seconds
        for step_seconds, after in _steps(chain, link, place, problem.budget_bytes):
            if after not in done:
                heapq.heappush(queue, (seconds + step_seconds, next(tie), after))
    return None


def _steps(chain: Chain, link: Link, place: _Place, budget: int) -> Iterator[tuple[float, _Place]]:
    yield from _runs(chain, place, budget)
    held = {(stage, i): (where, left) for stage, i, where, left in place.offload_units}
    for (stage, i), size in _holdings(chain, place.state).items():
        where, left = held.get((stage, i), ("here", 0.0))
        others = tuple(p for p in place.offload_units if p[:2] != (stage, i))
        if where == "here" and (link.host_bytes is None or _hosted(chain, place) + size <= link.host_bytes):
            end = place.out_seconds + link.to_host_seconds(size)
            yield 0.0, place._replace(offload_units=_sorted((*others, (stage, i, "leaving", end))), out_seconds=end)
        elif where == "leaving":
            yield left, _later(place._replace(offload_units=_sorted((*others, (stage, i, "away", 0.0)))), left)
        elif where == "away" and _live(chain, place) + size <= budget:
            end = place.back_seconds + link.to_device_seconds(size)
            yield 0.0, place._replace(offload_units=_sorted((*others, (stage, i, "coming", end))), back_seconds=end)


def _runs(chain: Chain, place: _Place, budget: int) -> Iterator[tuple[float, _Place]]:
    away = _bytes_of(chain, place.state) - _live(chain, place)
    for edge in _edges(chain, place.state):
        before = _bytes_of(chain, edge.before) - away
        if max(before + edge.peak_bytes, _bytes_of(chain, edge.state) - away) > budget:
            continue
        if edge.action.kind in ("free", "forward") and _input_travels(place, edge.action.stage + 1):
            continue
        mine = [p for p in place.offload_units if p[0] == edge.action.stage and edge.action.kind != "free"]
        if any(p[2] != "coming" for p in mine):
            continue
        wait = max((p[3] for p in mine), default=0.0)
        rest = place._replace(state=edge.state, offload_units=tuple(p for p in place.offload_units if p not in mine))
        yield wait + edge.seconds, _later(rest, wait + edge.seconds)


def _input_travels(place: _Place, reader: int) -> bool:
    """Whether a stage that waits has parts of its input on a journey."""
    return any(p[0] == reader and place.state.kept[reader] < 0 for p in place.offload_units)


def _later(place: _Place, seconds: float) -> _Place:
    units = tuple((stage, i, where, max(0.0, left - seconds)) for stage, i, where, left in place.offload_units)
    return place._replace(
        offload_units=units,
        out_seconds=max(0.0, place.out_seconds - seconds),
        back_seconds=max(0.0, place.back_seconds - seconds),
    )


def _sorted(units: tuple[Parcel, ...]) -> tuple[Parcel, ...]:
    return tuple(sorted(units))


def _holdings(chain: Chain, state: _State) -> dict[tuple[int, int], int]:
    """Sizes of all offload units that stages hold."""
    found: dict[tuple[int, int], int] = {}
    for k in range(min(state.reached, state.pending) + 1):
        stage = chain.stages[k]
        if state.kept[k] >= 0:
            units = stage.options[state.kept[k]].offload_units
        else:
            units = stage.offload_units if k == 0 or k - 1 in state.alive else ()
        found.update({(k, i): size for i, size in enumerate(units)})
    return found


def _hosted(chain: Chain, place: _Place) -> int:
    sizes = _holdings(chain, place.state)
    return sum(sizes[p[:2]] for p in place.offload_units)


def _live(chain: Chain, place: _Place) -> int:
    sizes = _holdings(chain, place.state)
    return _bytes_of(chain, place.state) - sum(sizes[p[:2]] for p in place.offload_units if p[2] == "away")
