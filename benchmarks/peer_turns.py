"""Timing in turns: several ways to run a step, one after another in every round, compared round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import planner
from benchmarks.one_step import seconds_of
from profiler.workload.workload import Workload

Step = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Seconds of every way, one per round; the n-th of all ways were taken side by side."""

    seconds: Mapping[str, tuple[float, ...]]

    def median(self, way: str) -> float:
        """Seconds of one way."""
        return statistics.median(self.seconds[way])

    def ratio(self, way: str, base: str) -> float:
        """Median over the rounds of the way's seconds over the base's."""
        return statistics.median(a / b for a, b in zip(self.seconds[way], self.seconds[base], strict=True))


def in_turns(ways: Mapping[str, Step], rounds: int) -> Turns:
    """Run every way once per round after one round to warm up.

    Args:
        ways: names and steps; a step returns its seconds.
        rounds: rounds that count.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, step in ways.items():
            found[name].append(step())
    return Turns(seconds={name: tuple(times[1:]) for name, times in found.items()})


def timed_step(workload: Workload, plan: planner.Plan | None = None) -> Step:
    """A step of the workload, under a plan where one is given; applying it and its first step are not timed."""

    def run() -> float:
        if plan is None:
            return seconds_of(workload)
        with planner.apply(workload.model, plan):
            seconds_of(workload)  # Its programs are made.
            return seconds_of(workload)

    return run
