"""Schedules that send parcels to host memory: many schedules without copies, each placed to fit the true budget.

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
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from solvers.chain.transfer_placement import Placement
from solvers.problem.chain import Chain
from solvers.problem.chain_schedule import Schedule
from solvers.problem.chain_simulator import replay
from solvers.problem.link import Link
from solvers.problem.solution import Problem


class Placeable(NamedTuple):
    """A schedule to place, and the method that made it."""

    method: str
    placement: Placement


def placeables(
    chain: Chain, schedules: Iterable[tuple[str, Schedule]], host_bytes: int | None
) -> tuple[Placeable, ...]:
    """One for each schedule with its method, by rising seconds of computation; of equal schedules the first counts."""
    methods: dict[Schedule, str] = {}
    for method, schedule in schedules:
        methods.setdefault(schedule, method)
    found = [Placeable(method, Placement(chain, schedule, host_bytes)) for schedule, method in methods.items()]
    return tuple(sorted(found, key=lambda candidate: candidate.placement.seconds))


def fastest(
    problem: Problem, link: Link, candidates: Sequence[Placeable], least: float = math.inf
) -> list[tuple[str, Schedule]]:
    """The fastest placed candidate within the budget, with its method, as a list of one.

    Empty where none fits, or none takes fewer than ``least`` seconds. Candidates stand by rising seconds.
    """
    best: list[tuple[str, Schedule]] = []
    for method, placement in candidates:
        if placement.seconds >= least:
            break
        count = placement.reach(problem.budget_bytes)
        if count is None:
            continue
        schedule = placement.placed(problem.budget_bytes, count)
        seconds = replay(problem.chain, schedule, link).seconds
        if seconds < least:
            best, least = [(method, schedule)], seconds
    return best


def smallest(candidates: Sequence[Placeable]) -> tuple[str, Schedule]:
    """The candidate with the smallest peak that copies can reach, placed so, with its method."""
    method, placement = min(candidates, key=lambda candidate: candidate.placement.smallest_peak())
    peak_bytes = placement.smallest_peak()
    return method, placement.placed(peak_bytes, placement.reach(peak_bytes) or 0)
