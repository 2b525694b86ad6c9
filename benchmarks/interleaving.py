"""Interleaved timing: plain and planned steps in turn, so that their ratio holds when the machine's speed drifts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import planner
from benchmarks.one_step import seconds_of
from profiler.workload.snapshot import preserved
from profiler.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Ratio:
    """Seconds of plain and planned steps (medians), and the median of the ratios pair by pair."""

    plain_seconds: float
    planned_seconds: float
    ratio: float


def interleaved(workload: Workload, plan: planner.Plan, rounds: int = 5) -> Ratio:
    """Time ``rounds`` pairs of a plain and a planned step after one of each to warm up."""
    plain, (planned,) = in_turns(workload, [plan], rounds)
    ratios = [b / a for a, b in zip(plain, planned, strict=True)]
    return Ratio(statistics.median(plain), statistics.median(planned), statistics.median(ratios))


def in_turns(workload: Workload, plans: Sequence[planner.Plan], rounds: int) -> tuple[list[float], list[list[float]]]:
    """Seconds of a plain step and of one under each plan, in every round; one round goes before to warm up.

    Each is the second of two steps: the first one meets the allocator as another plan has left it.
    """
    plain: list[float] = []
    planned: list[list[float]] = [[] for _ in plans]
    with preserved(workload):
        for _ in range(rounds + 1):
            plain.append(_second_step(workload))
            for plan, seconds in zip(plans, planned, strict=True):
                with planner.apply(workload.model, plan):
                    seconds.append(_second_step(workload))
    return plain[1:], [seconds[1:] for seconds in planned]


def _second_step(workload: Workload) -> float:
    seconds_of(workload)
    return seconds_of(workload)
