"""Schedules that the methods find, replayed: of the baselines and of the rotor's table, then the same with copies.

Formulation, with copies: a schedule that recomputes less than the budget asks for fits it with some of what it holds
offloaded. Every candidate, whatever its own peak, is placed (``solvers.chain.transfer_placement``) under the budget and
replayed with the link, those with the least computation first, until none that is left could be faster than the best.
Guarantee: no slower than the fastest candidate that fits without copies, and none of the placed candidates is faster.
The places of copies depend on bytes alone, so that a faster link never gives a slower answer.
Complexity: one placement and replay per candidate at most. Units: bytes and seconds.
Source: Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of rematerialization and offloading for training DNNs"
(2021), on choosing both together; the list scheduling of copies is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from solvers.chain import offloading, revolve, rotor
from solvers.chain.baselines import greedy_segments, keep_all, keep_all_replay, recompute_all, sqrt_segments
from solvers.chain.persistent import smallest_schedule
from solvers.chain.transfer_placement import Placement
from solvers.problem.chain import Chain, Link, Stage
from solvers.problem.schedule import Schedule
from solvers.problem.simulator import replay
from solvers.problem.solution import Problem

# The cheapest first: where the time is short, those are known.
BASELINES: dict[str, Callable[[Chain], list[Schedule]]] = {
    "keep_all": keep_all,
    "recompute_all": recompute_all,
    "chen_sqrt": sqrt_segments,
    "chen_greedy": greedy_segments,
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
    """The schedules of the baselines that take a moment on any chain."""
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
    yield from keep_all(chain)
    table = _table(chain.folded())
    points = [point for point in table.points() if point.peak_bytes <= budget_bytes]
    if points:
        yield table.schedule(points[-1])
    yield smallest_schedule(chain)
    if chain.shared:
        yield from (entry.schedule for entry in rotor_frontier(chain))


def extreme_schedules(chain: Chain) -> list[Schedule]:
    """The schedule that keeps everything, and the one with the smallest peak."""
    return [*keep_all(chain), smallest_schedule(chain)]


def even_budgets(chain: Chain, low: int, count: int) -> list[int]:
    """Budgets from a low one to the peak of keeping everything, evenly."""
    high = max(low, keep_all_replay(chain).peak_bytes)
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


NEED_LINK: tuple[str, ...] = ("offload_only", "pofo", "offload_ilp")
USE_LINK: tuple[str, ...] = (*NEED_LINK, "rotor", "auto")

LINK_BUDGETS = 24  # of a frontier with copies, each of which costs some placements
AWAY_PARTS = 4  # the first quarter, half, .. of the stages are taken as offloaded to find schedules worth placing
AWAY_POINTS = 30  # of each of these tables
NOMINAL_RATES = tuple(0.1 * 1.4**step for step in range(9))  # shares of that which sends all that is kept in a step
NOMINAL_STAGES = 40  # beyond, proposals for all of these rates take more than some seconds
ILP_SECONDS = 60.0  # of the integer program, where nothing else is asked for


class PlacementCandidate(NamedTuple):
    """A schedule to place, and the method that made it."""

    method: str
    placement: Placement


def can_offload(chain: Chain, link: Link | None) -> bool:
    """Whether anything of the chain can be offloaded, and host memory has room; if not, all is as without a link."""
    if link is None or not link.usable:
        return False
    sizes = (size for stage in chain.stages for holder in (stage, *stage.options) for size in holder.offload_units)
    return any(size and (link.host_bytes is None or size <= link.host_bytes) for size in sizes)


def schedules_with_copies(
    problem: Problem, solver: str, time_limit_seconds: float = ILP_SECONDS
) -> list[ReplayedSchedule]:
    """The fastest schedules that the method finds with copies; empty where none fits."""
    link = problem.link
    assert link is not None
    if solver not in ("pofo", "offload_ilp"):
        return _fastest(problem, link, _placements(problem.chain, link.host_bytes, solver))
    proposed = _fastest(problem, link, _proposals(problem.chain, problem.budget_bytes, link))
    if solver == "pofo" and proposed:
        return proposed
    placed = _fastest(problem, link, _placements(problem.chain, link.host_bytes, "rotor"))
    if solver == "pofo":
        return placed
    least_seconds = min((entry.seconds for entry in placed + proposed), default=math.inf)
    schedule = offloading.solve_program(problem, link, time_limit_seconds, least_seconds)
    of_program = [] if schedule is None else [replayed(problem.chain, "offload_ilp", schedule, link)]
    return of_program + placed + proposed


def schedules_for_slower_links(problem: Problem, least_seconds: float) -> list[ReplayedSchedule]:
    """The schedules of ``pofo`` for slower links, placed over the true one, if faster than ``least_seconds``.

    The rates of these links depend on the chain alone, and a faster link has more of them below it: so an answer that
    counts these never gets slower with a faster link, as that of ``pofo`` itself might.
    """
    chain, link = problem.chain, problem.link
    assert link is not None
    schedules: list[ReplayedSchedule] = []
    for rate in _nominal_rates(chain, min(link.to_host_bytes_per_second, link.to_device_bytes_per_second)):
        nominal = replace(link, to_host_bytes_per_second=rate, to_device_bytes_per_second=rate)
        schedules += _fastest(problem, link, _proposals(chain, problem.budget_bytes, nominal), least_seconds)
        least_seconds = min([least_seconds, *(entry.seconds for entry in schedules)])
    return schedules


def _nominal_rates(chain: Chain, fastest_rate: float) -> list[float]:
    """Rates up to a fastest one, in shares of that which sends all that keeping everything keeps in the step's time."""
    if len(chain.stages) > NOMINAL_STAGES:
        return []
    whole = sum(sum(stage.options[0].offload_units) for stage in chain.stages) / (chain.unplanned_seconds or 1.0)
    return [share * whole for share in NOMINAL_RATES if 0 < share * whole <= fastest_rate]


def _fastest(
    problem: Problem, link: Link, candidates: Sequence[PlacementCandidate], least_seconds: float = math.inf
) -> list[ReplayedSchedule]:
    """The fastest placed candidate within the budget, as a list of one.

    Empty where none fits, or none takes fewer than ``least_seconds``. Candidates stand by rising seconds.
    """
    best: list[ReplayedSchedule] = []
    for method, placement in candidates:
        if placement.seconds >= least_seconds:
            break
        count = placement.absences_needed(problem.budget_bytes)
        if count is None:
            continue
        placed = replayed(problem.chain, method, placement.placed(problem.budget_bytes, count), link)
        if placed.seconds < least_seconds:
            best, least_seconds = [placed], placed.seconds
    return best


@lru_cache(maxsize=16)
def _proposals(chain: Chain, budget_bytes: int, link: Link) -> tuple[PlacementCandidate, ...]:
    candidates = [
        PlacementCandidate("pofo", Placement(chain, proposal.schedule, link.host_bytes, proposal.offloaded))
        for proposal in offloading.proposals(chain, budget_bytes, link)
    ]
    return tuple(sorted(candidates, key=lambda candidate: candidate.placement.seconds))


def smallest_with_copies(problem: Problem, solver: str) -> ReplayedSchedule:
    """The schedule with the smallest peak that the method reaches with copies."""
    assert problem.link is not None
    placed_by = "rotor" if solver in ("pofo", "offload_ilp") else solver
    candidates = _placements(problem.chain, problem.link.host_bytes, placed_by)
    method, placement = min(candidates, key=lambda candidate: candidate.placement.smallest_peak())
    peak_bytes = placement.smallest_peak()
    schedule = placement.placed(peak_bytes, placement.absences_needed(peak_bytes) or 0)
    return replayed(problem.chain, method, schedule, problem.link)


def frontier_with_copies(chain: Chain, solver: str, link: Link) -> list[ReplayedSchedule]:
    """Schedules with copies for budgets from the smallest peak they reach to that of keeping everything."""
    low = smallest_with_copies(Problem(chain=chain, budget_bytes=0, link=link), solver).peak_bytes
    problems = [Problem(chain=chain, budget_bytes=b, link=link) for b in even_budgets(chain, low, LINK_BUDGETS)]
    return [schedule for problem in problems for schedule in schedules_with_copies(problem, solver)]


@lru_cache(maxsize=4)
def _placements(chain: Chain, host_bytes: int | None, solver: str) -> tuple[PlacementCandidate, ...]:
    """The schedules that the method places, by rising seconds of computation; of equal schedules the first counts.

    Remembered: offload units leave in the same order for all budgets and rates.
    """
    schedules = [("offload_only", schedule) for schedule in keep_all(chain)]
    if solver != "offload_only":
        schedules += [("rotor", schedule) for schedule in _rotor_schedules(chain)]
    if solver == "auto":
        schedules += [(entry.solver, entry.schedule) for entry in all_baseline_schedules(chain)]
    methods: dict[Schedule, str] = {}
    for method, schedule in schedules:
        methods.setdefault(schedule, method)
    candidates = [
        PlacementCandidate(method, Placement(chain, schedule, host_bytes)) for schedule, method in methods.items()
    ]
    return tuple(sorted(candidates, key=lambda candidate: candidate.placement.seconds))


def _rotor_schedules(chain: Chain) -> list[Schedule]:
    """The rotor's frontier, that of option 0 alone, and those of chains of whose first stages all units are away.

    The copies of the first stages have most time. With offload units away the table keeps what it would have dropped.
    """
    count = len(chain.stages)
    parts = 1 if count > LONG_CHAIN else AWAY_PARTS
    away = dict.fromkeys(without_offload_units(chain, count * part // parts) for part in range(1, parts + 1))
    smallest = [smallest_schedule(variant) for variant in away]
    variants = [variant for variant in (chain.without_menus(),) if variant != chain] + [*away]
    tables = [rotor.Table(variant.folded()) for variant in variants]
    points = [(table, point) for table in tables for point in evenly_picked(table.points(), AWAY_POINTS)]
    frontier = [entry.schedule for entry in rotor_frontier(chain)]
    return [*frontier, *smallest, *(table.schedule(point) for table, point in points)]


def without_offload_units(chain: Chain, count: int) -> Chain:
    """The chain as it would be if all offload units of the first ``count`` stages were always away.

    At the start of every backward a schedule with copies holds at least what the same schedule holds in this chain, so
    that ``lower_bound.bound_seconds`` of it bounds them all, however fast the link is.
    """
    stages = list(chain.stages)
    resident_bytes = chain.resident_bytes
    for k in range(count):
        before_bytes = stages[k - 1].boundary_bytes if k else resident_bytes
        input_bytes = min(before_bytes, sum(stages[k].offload_units))  # away of its input, where it waits
        if k:
            stages[k - 1] = replace(stages[k - 1], boundary_bytes=before_bytes - input_bytes)
        else:
            resident_bytes -= input_bytes
        stages[k] = _kept_away(stages[k], input_bytes)
    return replace(chain, stages=tuple(stages), resident_bytes=resident_bytes)


def _kept_away(stage: Stage, input_bytes: int) -> Stage:
    """The stage with its kept units away; of its input nothing is away where the stage is kept."""
    options = tuple(replace(o, kept_bytes=o.kept_bytes - sum(o.offload_units) + input_bytes) for o in stage.options)
    return replace(stage, options=options)
