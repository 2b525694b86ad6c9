"""Answers with copies over a link, for the methods that weigh one: candidates placed, the fastest, the leanest."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from solvers.chain import keep_all, offload, offload_ilp, pofo
from solvers.chain.candidates import LONG_CHAIN, Found, of_baselines, replayed, rotor_frontier, sample
from solvers.chain.minimum_memory import smallest_schedule
from solvers.chain.parcels import has_parcels, without_parcels
from solvers.chain.rotor import Table
from solvers.chain.transfer_placement import Placement
from solvers.problem.chain import Chain
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


def carries(chain: Chain, link: Link | None) -> bool:
    """Whether anything of the chain can travel; where not, all is as without a link."""
    return link is not None and link.usable and has_parcels(chain, link.host_bytes)


def sent_by(problem: Problem, solver: str, time_limit_seconds: float = ILP_SECONDS) -> list[Found]:
    """The fastest schedules that the method finds with copies; empty where none fits."""
    link = problem.link
    assert link is not None
    if solver == "offload_ilp":
        return _programmed(problem, link, time_limit_seconds)
    if solver != "pofo":
        return _placed(problem, link, solver)
    found = _fastest(problem, link, _drafts(problem.chain, problem.budget_bytes, link))
    return found or _placed(problem, link, "rotor")


def drafted(problem: Problem, least_seconds: float) -> list[Found]:
    """What ``pofo`` finds for a ladder of slower links, placed over the true one, if faster than ``least_seconds``.

    The steps of the ladder depend on the chain alone, and a faster link has more of them below it: so an answer that
    counts these never gets slower with a faster link, as that of ``pofo`` itself might.
    """
    chain, link = problem.chain, problem.link
    assert link is not None
    found: list[Found] = []
    for rate in _ladder(chain, min(link.to_host_bytes_per_second, link.to_device_bytes_per_second)):
        nominal = replace(link, to_host_bytes_per_second=rate, to_device_bytes_per_second=rate)
        found += _fastest(problem, link, _drafts(chain, problem.budget_bytes, nominal), least_seconds)
        least_seconds = min([least_seconds, *(entry.seconds for entry in found)])
    return found


def _ladder(chain: Chain, fastest_rate: float) -> list[float]:
    """Steps up to a rate, in shares of the one that sends all that keeping everything keeps within the step's time."""
    if len(chain.stages) > DRAFT_STAGES:
        return []
    whole = sum(sum(stage.options[0].parcels) for stage in chain.stages) / (chain.unplanned_seconds or 1.0)
    return [share * whole for share in DRAFT_RATES if 0 < share * whole <= fastest_rate]


def _programmed(problem: Problem, link: Link, time_limit_seconds: float) -> list[Found]:
    """The program's answer, beside the placed ones that it need not look beyond."""
    known = _placed(problem, link, "rotor") + _fastest(
        problem, link, _drafts(problem.chain, problem.budget_bytes, link)
    )
    least_seconds = min((entry.seconds for entry in known), default=math.inf)
    schedule = offload_ilp.solve(problem, link, time_limit_seconds, least_seconds).schedule
    return [*([] if schedule is None else [replayed(problem.chain, "offload_ilp", schedule, link)]), *known]


def _placed(problem: Problem, link: Link, solver: str) -> list[Found]:
    return _fastest(problem, link, _placeables(problem.chain, link.host_bytes, solver))


def _fastest(
    problem: Problem, link: Link, candidates: tuple[offload.Placeable, ...], least_seconds: float = math.inf
) -> list[Found]:
    best = offload.fastest(problem, link, candidates, least_seconds)
    return [replayed(problem.chain, method, schedule, link) for method, schedule in best]


@lru_cache(maxsize=16)
def _drafts(chain: Chain, budget_bytes: int, link: Link) -> tuple[offload.Placeable, ...]:
    found = pofo.drafts(chain, budget_bytes, link)
    placed = [
        offload.Placeable("pofo", Placement(chain, draft.schedule, link.host_bytes, draft.sent)) for draft in found
    ]
    return tuple(sorted(placed, key=lambda candidate: candidate.placement.seconds))


def leanest(problem: Problem, solver: str) -> Found:
    """The smallest peak that the method reaches with copies."""
    assert problem.link is not None
    known = "rotor" if solver in ("pofo", "offload_ilp") else solver
    method, schedule = offload.smallest(_placeables(problem.chain, problem.link.host_bytes, known))
    return replayed(problem.chain, method, schedule, problem.link)


def entries_sent(chain: Chain, solver: str, link: Link) -> list[Found]:
    """Answers with copies for budgets from the smallest peak they reach to that of keeping everything."""
    low, steps = leanest(Problem(chain=chain, budget_bytes=0, link=link), solver).peak_bytes, LINK_BUDGETS - 1
    high = max(low, replay(chain, keep_all.schedules(chain)[0]).peak_bytes)
    budgets = [low + (high - low) * i // steps for i in range(steps + 1)]
    return [found for b in budgets for found in sent_by(Problem(chain=chain, budget_bytes=b, link=link), solver)]


@lru_cache(maxsize=4)
def _placeables(chain: Chain, host_bytes: int | None, solver: str) -> tuple[offload.Placeable, ...]:
    """What the method places. Remembered: parcels leave in the same order for all budgets and rates."""
    found = [("offload_only", schedule) for schedule in keep_all.schedules(chain)]
    if solver != "offload_only":
        found += [("rotor", schedule) for schedule in _of_tables(chain)]
    if solver == "auto":
        found += [(entry.solver, entry.schedule) for entry in of_baselines(chain)]
    return offload.placeables(chain, found, host_bytes)


def _of_tables(chain: Chain) -> list[Schedule]:
    """The rotor's frontier, that of option 0 alone, and those of chains of whose first stages all parcels are away.

    The copies of the first stages have most time. With parcels away the table keeps what it would have dropped.
    """
    count = len(chain.stages)
    parts = 1 if count > LONG_CHAIN else SENT_PARTS
    first = dict.fromkeys(without_parcels(chain, count * part // parts) for part in range(1, parts + 1))
    lean = [smallest_schedule(variant) for variant in first]
    whole = [replace(chain, stages=tuple(replace(s, options=s.options[:1]) for s in chain.stages))]
    variants = [*(variant for variant in whole if variant != chain), *first]
    tables = [Table(variant.folded()) for variant in variants]
    points = [(table, point) for table in tables for point in sample(table.points(), SENT_POINTS)]
    own = [entry.schedule for entry in rotor_frontier(chain)]
    return [*own, *lean, *(table.schedule(point) for table, point in points)]
