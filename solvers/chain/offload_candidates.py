"""Answers with copies over a link, for the methods that weigh one: candidates placed, the fastest, the leanest.

Formulation: a schedule that recomputes less than the budget asks for fits it with some of what it holds away. Every
candidate, whatever its own peak, is placed (``solvers.chain.transfer_placement``) under the budget and replayed with
the link, those with the least computation first, until none that is left could be faster than the best.
Guarantee: no slower than the fastest candidate that fits without copies, and none of the placed candidates is faster.
The candidates' places depend on bytes alone, so that a faster link never gives a slower answer.
Complexity: one placement and replay per candidate at most. Units: bytes and seconds.
Source: Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of rematerialization and offloading for training DNNs"
(2021), on choosing both together; the list scheduling of copies is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from solvers.chain import baselines, offload_ilp, pofo
from solvers.chain.candidates import LONG_CHAIN, ReplayedSchedule, of_baselines, replayed, rotor_frontier, sample
from solvers.chain.minimum_memory import smallest_schedule
from solvers.chain.rotor import Table
from solvers.chain.transfer_placement import Placement
from solvers.problem.chain import Chain, Stage
from solvers.problem.chain_schedule import Schedule
from solvers.problem.chain_simulator import replay
from solvers.problem.link import Link
from solvers.problem.solution import Problem

LINKED: tuple[str, ...] = ("offload_only", "pofo", "offload_ilp")  # they need a link
WITH_COPIES: tuple[str, ...] = (*LINKED, "rotor", "auto")  # they use one

LINK_BUDGETS = 24  # of a frontier with copies, each of which costs some placements
SENT_PARTS = 4  # the first quarter, half, .. of the stages are taken as away to find schedules worth placing
SENT_POINTS = 30  # of each of these tables
DRAFT_RATES = tuple(0.1 * 1.4**step for step in range(9))  # of that which sends all that is kept in a step's time
ILP_SECONDS = 60.0  # of the integer program, where nothing else is asked for
DRAFT_STAGES = 40  # beyond, the ladder takes more than some seconds


class Placeable(NamedTuple):
    """A schedule to place, and the method that made it."""

    method: str
    placement: Placement


def carries(chain: Chain, link: Link | None) -> bool:
    """Whether anything of the chain can travel; where not, all is as without a link."""
    return link is not None and link.usable and has_offload_units(chain, link.host_bytes)


def sent_by(problem: Problem, solver: str, time_limit_seconds: float = ILP_SECONDS) -> list[ReplayedSchedule]:
    """The fastest schedules that the method finds with copies; empty where none fits."""
    link = problem.link
    assert link is not None
    if solver == "offload_ilp":
        return _programmed(problem, link, time_limit_seconds)
    if solver != "pofo":
        return _placed(problem, link, solver)
    found = _fastest(problem, link, _drafts(problem.chain, problem.budget_bytes, link))
    return found or _placed(problem, link, "rotor")


def drafted(problem: Problem, least_seconds: float) -> list[ReplayedSchedule]:
    """What ``pofo`` finds for a ladder of slower links, placed over the true one, if faster than ``least_seconds``.

    The steps of the ladder depend on the chain alone, and a faster link has more of them below it: so an answer that
    counts these never gets slower with a faster link, as that of ``pofo`` itself might.
    """
    chain, link = problem.chain, problem.link
    assert link is not None
    found: list[ReplayedSchedule] = []
    for rate in _ladder(chain, min(link.to_host_bytes_per_second, link.to_device_bytes_per_second)):
        nominal = replace(link, to_host_bytes_per_second=rate, to_device_bytes_per_second=rate)
        found += _fastest(problem, link, _drafts(chain, problem.budget_bytes, nominal), least_seconds)
        least_seconds = min([least_seconds, *(entry.seconds for entry in found)])
    return found


def _ladder(chain: Chain, fastest_rate: float) -> list[float]:
    """Steps up to a rate, in shares of the one that sends all that keeping everything keeps within the step's time."""
    if len(chain.stages) > DRAFT_STAGES:
        return []
    whole = sum(sum(stage.options[0].offload_units) for stage in chain.stages) / (chain.unplanned_seconds or 1.0)
    return [share * whole for share in DRAFT_RATES if 0 < share * whole <= fastest_rate]


def _programmed(problem: Problem, link: Link, time_limit_seconds: float) -> list[ReplayedSchedule]:
    """The program's answer, beside the placed ones that it need not look beyond."""
    known = _placed(problem, link, "rotor") + _fastest(
        problem, link, _drafts(problem.chain, problem.budget_bytes, link)
    )
    least_seconds = min((entry.seconds for entry in known), default=math.inf)
    schedule = offload_ilp.solve(problem, link, time_limit_seconds, least_seconds).schedule
    return [*([] if schedule is None else [replayed(problem.chain, "offload_ilp", schedule, link)]), *known]


def _placed(problem: Problem, link: Link, solver: str) -> list[ReplayedSchedule]:
    return _fastest(problem, link, _placeables(problem.chain, link.host_bytes, solver))


def _fastest(
    problem: Problem, link: Link, candidates: Sequence[Placeable], least_seconds: float = math.inf
) -> list[ReplayedSchedule]:
    """The fastest placed candidate within the budget, as a list of one.

    Empty where none fits, or none takes fewer than ``least_seconds``. Candidates stand by rising seconds.
    """
    best: list[ReplayedSchedule] = []
    for method, placement in candidates:
        if placement.seconds >= least_seconds:
            break
        count = placement.reach(problem.budget_bytes)
        if count is None:
            continue
        placed = replayed(problem.chain, method, placement.placed(problem.budget_bytes, count), link)
        if placed.seconds < least_seconds:
            best, least_seconds = [placed], placed.seconds
    return best


@lru_cache(maxsize=16)
def _drafts(chain: Chain, budget_bytes: int, link: Link) -> tuple[Placeable, ...]:
    found = pofo.drafts(chain, budget_bytes, link)
    placed = [Placeable("pofo", Placement(chain, draft.schedule, link.host_bytes, draft.sent)) for draft in found]
    return tuple(sorted(placed, key=lambda candidate: candidate.placement.seconds))


def leanest(problem: Problem, solver: str) -> ReplayedSchedule:
    """The smallest peak that the method reaches with copies."""
    assert problem.link is not None
    known = "rotor" if solver in ("pofo", "offload_ilp") else solver
    candidates = _placeables(problem.chain, problem.link.host_bytes, known)
    method, placement = min(candidates, key=lambda candidate: candidate.placement.smallest_peak())
    peak_bytes = placement.smallest_peak()
    schedule = placement.placed(peak_bytes, placement.reach(peak_bytes) or 0)
    return replayed(problem.chain, method, schedule, problem.link)


def entries_sent(chain: Chain, solver: str, link: Link) -> list[ReplayedSchedule]:
    """Answers with copies for budgets from the smallest peak they reach to that of keeping everything."""
    low, steps = leanest(Problem(chain=chain, budget_bytes=0, link=link), solver).peak_bytes, LINK_BUDGETS - 1
    high = max(low, replay(chain, baselines.keep_all(chain)[0]).peak_bytes)
    budgets = [low + (high - low) * i // steps for i in range(steps + 1)]
    return [found for b in budgets for found in sent_by(Problem(chain=chain, budget_bytes=b, link=link), solver)]


@lru_cache(maxsize=4)
def _placeables(chain: Chain, host_bytes: int | None, solver: str) -> tuple[Placeable, ...]:
    """What the method places, by rising seconds of computation; of equal schedules the first counts.

    Remembered: offload units leave in the same order for all budgets and rates.
    """
    found = [("offload_only", schedule) for schedule in baselines.keep_all(chain)]
    if solver != "offload_only":
        found += [("rotor", schedule) for schedule in _of_tables(chain)]
    if solver == "auto":
        found += [(entry.solver, entry.schedule) for entry in of_baselines(chain)]
    methods: dict[Schedule, str] = {}
    for method, schedule in found:
        methods.setdefault(schedule, method)
    placed = [Placeable(method, Placement(chain, schedule, host_bytes)) for schedule, method in methods.items()]
    return tuple(sorted(placed, key=lambda candidate: candidate.placement.seconds))


def _of_tables(chain: Chain) -> list[Schedule]:
    """The rotor's frontier, that of option 0 alone, and those of chains of whose first stages all units are away.

    The copies of the first stages have most time. With offload units away the table keeps what it would have dropped.
    """
    count = len(chain.stages)
    parts = 1 if count > LONG_CHAIN else SENT_PARTS
    first = dict.fromkeys(without_offload_units(chain, count * part // parts) for part in range(1, parts + 1))
    lean = [smallest_schedule(variant) for variant in first]
    whole = [replace(chain, stages=tuple(replace(s, options=s.options[:1]) for s in chain.stages))]
    variants = [*(variant for variant in whole if variant != chain), *first]
    tables = [Table(variant.folded()) for variant in variants]
    points = [(table, point) for table in tables for point in sample(table.points(), SENT_POINTS)]
    own = [entry.schedule for entry in rotor_frontier(chain)]
    return [*own, *lean, *(table.schedule(point) for table, point in points)]


def has_offload_units(chain: Chain, host_bytes: int | None = None) -> bool:
    """Whether any stage holds something that could travel and that host memory has room for."""
    sizes = (size for s in chain.stages for held in (s, *s.options) for size in held.offload_units)
    return any(size and (host_bytes is None or size <= host_bytes) for size in sizes)


def without_offload_units(chain: Chain, count: int | None = None) -> Chain:
    """The chain as it would be if all offload units of the first ``count`` stages (None: of all) were always away.

    At the start of every backward a schedule with copies holds at least what the same schedule holds in this chain, so
    that ``lower_bound.bound_seconds`` of it bounds them all, however fast the link is.
    """
    stages = list(chain.stages)
    resident_bytes = chain.resident_bytes
    for k in range(len(stages) if count is None else min(count, len(stages))):
        before_bytes = stages[k - 1].boundary_bytes if k else resident_bytes
        sent_bytes = min(before_bytes, sum(stages[k].offload_units))  # of its input, where it waits
        if k:
            stages[k - 1] = replace(stages[k - 1], boundary_bytes=before_bytes - sent_bytes)
        else:
            resident_bytes -= sent_bytes
        stages[k] = _kept_away(stages[k], sent_bytes)
    return replace(chain, stages=tuple(stages), resident_bytes=resident_bytes)


def _kept_away(stage: Stage, sent_bytes: int) -> Stage:
    """The stage with its kept units away; where it is kept, what it would send of its input while it waits stays."""
    options = tuple(replace(o, kept_bytes=o.kept_bytes - sum(o.offload_units) + sent_bytes) for o in stage.options)
    return replace(stage, options=options)
