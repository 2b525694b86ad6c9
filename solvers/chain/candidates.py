"""Schedules without copies that the quick methods find, replayed: those of the baselines and of the rotor's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from solvers.chain import baselines, chen, revolve, rotor
from solvers.chain.minimum_memory import smallest_schedule
from solvers.problem.chain import Chain, Link
from solvers.problem.schedule import Schedule
from solvers.problem.simulator import replay
from solvers.problem.solution import Problem

# The cheapest first: where the time is short, those are known.
BASELINES: dict[str, Callable[[Chain], list[Schedule]]] = {
    "keep_all": baselines.keep_all,
    "recompute_all": baselines.recompute_all,
    "chen_sqrt": chen.sqrt_segments,
    "chen_greedy": chen.greedy_segments,
    "revolve": revolve.schedules,
}

FRONTIER_POINTS = 100  # replayed and returned; a curve needs no more
LONG_CHAIN = 250  # stages from which a replay takes a good part of a second, and methods show fewer candidates
LONG_FRONTIER_POINTS = 30
LONG_CANDIDATES = 4  # of each baseline within auto

_Item = TypeVar("_Item")


class ReplayedSchedule(NamedTuple):
    """A schedule, the method that made it, and what its replay says."""

    solver: str
    schedule: Schedule
    peak_bytes: int
    seconds: float


def replayed(chain: Chain, solver: str, schedule: Schedule, link: Link | None = None) -> ReplayedSchedule:
    """Replay a schedule that a method has made."""
    result = replay(chain, schedule, link)
    return ReplayedSchedule(solver, schedule, result.peak_bytes, result.seconds)


def baseline_schedules(chain: Chain, solver: str) -> Iterator[ReplayedSchedule]:
    """All schedules of one baseline."""
    return (replayed(chain, solver, schedule) for schedule in BASELINES[solver](chain))


def all_baseline_schedules(chain: Chain) -> Iterator[ReplayedSchedule]:
    """Schedules of all baselines; of long chains an even sample of them, since each one is replayed."""
    limit = LONG_CANDIDATES if len(chain.stages) > LONG_CHAIN else None
    schedules_by_name = ((name, evenly_picked(schedules(chain), limit)) for name, schedules in BASELINES.items())
    return (replayed(chain, name, schedule) for name, picked in schedules_by_name for schedule in picked)


def quick_schedules(chain: Chain) -> Iterator[ReplayedSchedule]:
    """Of the baselines that take a moment on whatever chain."""
    return (each for name in ("keep_all", "recompute_all", "chen_sqrt") for each in baseline_schedules(chain, name))


def rotor_schedules(problem: Problem) -> Iterator[ReplayedSchedule]:
    """The table's answer, and the two extremes that its grid may miss: nothing recomputed, and the smallest peak.

    Where stages share tensors, the table counts them throughout and true peaks lie lower: then every schedule of the
    frontier is a candidate too. Where stages have menus, so is what the table finds without them: its memory grid is
    another one, and more options must never make a plan slower.
    """
    chain = problem.chain
    variants = [chain]
    if any(len(stage.options) > 1 for stage in chain.stages):
        variants.append(chain.without_menus())
    for variant in variants:
        for schedule in _table_schedules(variant, problem.budget_bytes):
            yield replayed(chain, "rotor", schedule)


def _table_schedules(chain: Chain, budget_bytes: int) -> Iterator[Schedule]:
    yield from baselines.keep_all(chain)
    table = _table(chain.folded())
    points = [point for point in table.points() if point.peak_bytes <= budget_bytes]
    if points:
        yield table.schedule(points[-1])
    yield smallest_schedule(chain)
    if chain.shared:
        yield from (entry.schedule for entry in rotor_frontier(chain))


def extreme_schedules(chain: Chain) -> list[Schedule]:
    """The schedule that keeps everything, and the one with the smallest peak."""
    return [*baselines.keep_all(chain), smallest_schedule(chain)]


def even_budgets(chain: Chain, low: int, count: int) -> list[int]:
    """Budgets from a low one to the peak of keeping everything, evenly."""
    high = max(low, baselines.keep_all_replay(chain).peak_bytes)
    return [low + (high - low) * i // (count - 1) for i in range(count)]


_table = lru_cache(maxsize=4)(rotor.Table)  # remembered: asking for several budgets of one chain costs one solve


@lru_cache(maxsize=1)
def rotor_frontier(chain: Chain) -> tuple[ReplayedSchedule, ...]:
    """Schedules from all over the frontier of the rotor's table, and the extremes."""
    return tuple(rotor_points(chain))


def rotor_points(chain: Chain) -> Iterator[ReplayedSchedule]:
    """The same one by one, as they are found."""
    for variant in dict.fromkeys((chain.folded(), replace(chain, shared=()))):
        table = _table(variant)
        limit = LONG_FRONTIER_POINTS if len(chain.stages) > LONG_CHAIN else FRONTIER_POINTS
        for point in evenly_picked(table.points(), limit):
            yield replayed(chain, "rotor", table.schedule(point))
    for schedule in extreme_schedules(chain):
        yield replayed(chain, "rotor", schedule)


def evenly_picked(items: list[_Item], limit: int | None) -> list[_Item]:
    """Evenly picked items, the first and the last among them."""
    if limit is None or len(items) <= limit:
        return items
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]
