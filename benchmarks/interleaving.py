"""Interleaved timing: plain and planned steps in turn, so that their ratio holds when the machine's speed drifts."""

from __future__ import annotations

import statistics
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
    plain: list[float] = []
    planned: list[float] = []
    with preserved(workload):
        for _ in range(rounds + 1):
            plain.append(seconds_of(workload))
            with planner.apply(workload.model, plan):
                planned.append(seconds_of(workload))
    ratios = [b / a for a, b in zip(plain[1:], planned[1:], strict=True)]
    return Ratio(statistics.median(plain[1:]), statistics.median(planned[1:]), statistics.median(ratios))
