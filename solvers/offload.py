"""Schedules that send parcels to host memory: many schedules without copies, each placed to fit the true budget.

Formulation: a schedule that recomputes less than the budget asks for fits it with some of what it holds away. Every
candidate, whatever its own peak, is placed (``solvers.placement``) under the budget and replayed with the link, those
with the least computation first, until none that is left could be faster than the best.
Guarantee: no slower than the fastest candidate that fits without copies, and none of the placed candidates is faster.
The candidates' places depend on bytes alone, so that a faster link never gives a slower answer.
Complexity: one placement and replay per candidate at most. Units: bytes and seconds.
Source: Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of rematerialization and offloading for training DNNs"
(2021), on choosing both together; the list scheduling of copies is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from solvers.chain import Chain
from solvers.link import Link
from solvers.placement import Placement
from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.simulator import replay


def placements(chain: Chain, schedules: Iterable[Schedule], host_bytes: int | None) -> tuple[Placement, ...]:
    """One for each schedule, by rising seconds of computation."""
    found = [Placement(chain, schedule, host_bytes) for schedule in dict.fromkeys(schedules)]
    return tuple(sorted(found, key=lambda placement: placement.seconds))


def fastest(problem: Problem, link: Link, candidates: Sequence[Placement]) -> list[Schedule]:
    """The fastest placed candidate within the budget, as a list of one; empty where none fits."""
    best: list[Schedule] = []
    least = math.inf
    for candidate in candidates:
        if candidate.seconds >= least:
            break
        count = candidate.reach(problem.budget_bytes)
        if count is None:
            continue
        schedule = candidate.placed(problem.budget_bytes, count)
        seconds = replay(problem.chain, schedule, link).seconds
        if seconds < least:
            best, least = [schedule], seconds
    return best


def smallest(candidates: Sequence[Placement]) -> Schedule:
    """The candidate with the smallest peak that copies can reach, placed so."""
    best = min(candidates, key=lambda candidate: candidate.smallest_peak())
    peak_bytes = best.smallest_peak()
    return best.placed(peak_bytes, best.reach(peak_bytes) or 0)
