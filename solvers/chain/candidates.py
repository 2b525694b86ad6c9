"""What the quick methods find without copies: schedules of the baselines and of the rotor's table, replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from solvers.chain import baselines, chen, revolve
from solvers.chain.minimum_memory import smallest_schedule
from solvers.chain.rotor import Table
from solvers.problem.chain import Chain
from solvers.problem.chain_schedule import Schedule
from solvers.problem.chain_simulator import replay
from solvers.problem.link import Link
from solvers.problem.solution import Problem

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
    result = replay(chain, schedule, link)
    return ReplayedSchedule(solver, schedule, result.peak_bytes, result.seconds)


def of_baseline(chain: Chain, solver: str) -> list[ReplayedSchedule]:
    return [replayed(chain, solver, schedule) for schedule in BASELINES[solver](chain)]


def of_baselines(chain: Chain) -> list[ReplayedSchedule]:
    """What all baselines find; of long chains an even sample of their candidates, since each one is replayed."""
    most = LONG_CANDIDATES if len(chain.stages) > LONG_CHAIN else None
    made = [(name, sample(schedules(chain), most)) for name, schedules in BASELINES.items()]
    return [replayed(chain, name, schedule) for name, found in made for schedule in found]


def of_rotor(problem: Problem) -> list[ReplayedSchedule]:
    """The table's answer, beside the two ends that the grid may miss: nothing recomputed, and the smallest peak.

    Where stages share tensors, the table counts them throughout and true peaks lie lower: then every schedule of the
    frontier is a candidate too. Where stages have menus, so is what the table finds without them: its memory grid is
    another one, and more options must never make a plan slower.
    """
    chain = problem.chain
    found = [replayed(chain, "rotor", schedule) for schedule in _of_table(chain, problem.budget_bytes)]
    if any(len(stage.options) > 1 for stage in chain.stages):
        whole = replace(chain, stages=tuple(replace(stage, options=stage.options[:1]) for stage in chain.stages))
        found += [replayed(chain, "rotor", schedule) for schedule in _of_table(whole, problem.budget_bytes)]
    return found


def _of_table(chain: Chain, budget_bytes: int) -> list[Schedule]:
    table = _table(chain.folded())
    points = [point for point in table.points() if point.peak_bytes <= budget_bytes]
    schedules = [*([table.schedule(points[-1])] if points else []), *ends(chain)]
    return schedules + [entry.schedule for entry in rotor_frontier(chain)] if chain.shared else schedules


def ends(chain: Chain) -> list[Schedule]:
    return [*baselines.keep_all(chain), smallest_schedule(chain)]


@lru_cache(maxsize=4)
def _table(chain: Chain) -> Table:
    """The last tables are remembered: asking for several budgets of one chain costs one solve."""
    return Table(chain)


@lru_cache(maxsize=1)
def rotor_frontier(chain: Chain) -> tuple[ReplayedSchedule, ...]:
    schedules = ends(chain)
    for variant in dict.fromkeys((chain.folded(), replace(chain, shared=()))):
        table = _table(variant)
        most = LONG_FRONTIER_POINTS if len(chain.stages) > LONG_CHAIN else FRONTIER_POINTS
        schedules += [table.schedule(point) for point in sample(table.points(), most)]
    return tuple(replayed(chain, "rotor", schedule) for schedule in schedules)


def sample(items: list[_Item], most: int | None) -> list[_Item]:
    """Evenly picked items, the first and the last among them."""
    if most is None or len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
