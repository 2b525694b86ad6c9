"""Answers with copies over a link, for the methods that weigh one: candidates placed, the fastest, the leanest."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from solvers import keep_all, offload
from solvers.candidates import LONG_CHAIN, Found, of_baselines, replayed, rotor_frontier, sample
from solvers.chain import Chain
from solvers.link import Link
from solvers.minimum_memory import smallest_schedule
from solvers.parcels import has_parcels, without_parcels
from solvers.problem import Problem
from solvers.rotor import Table
from solvers.schedule import Schedule
from solvers.simulator import replay

LINKED: tuple[str, ...] = ("offload_only",)  # they need a link
WITH_COPIES: tuple[str, ...] = (*LINKED, "rotor", "auto")  # they use one

LINK_BUDGETS = 24  # of a frontier with copies, each of which costs some placements
SENT_PARTS = 4  # the first quarter, half, .. of the stages are taken as away to find schedules worth placing
SENT_POINTS = 30  # of each of these tables


def carries(chain: Chain, link: Link | None) -> bool:
    """Whether anything of the chain can travel; where not, all is as without a link."""
    return link is not None and link.usable and has_parcels(chain, link.host_bytes)


def sent_by(problem: Problem, solver: str) -> list[Found]:
    """The fastest schedule that the method finds with copies; empty where none fits."""
    link = problem.link
    assert link is not None
    best = offload.fastest(problem, link, _placeables(problem.chain, link.host_bytes, solver))
    return [replayed(problem.chain, method, schedule, link) for method, schedule in best]


def leanest(problem: Problem, solver: str) -> Found:
    """The smallest peak that the method reaches with copies."""
    assert problem.link is not None
    method, schedule = offload.smallest(_placeables(problem.chain, problem.link.host_bytes, solver))
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
