"""Phases between the marks of a step, put together: by mark, one after another, the highest, the typical."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from profiler.measurement.meter import Mark, MarkedPhases
from profiler.records import Phase

PhasesOfMark = dict[Mark, list[Phase]]


def by_mark(phases: MarkedPhases) -> PhasesOfMark:
    """Phases grouped by their marks, both in order of time."""
    grouped: PhasesOfMark = {}
    for mark, phase in phases:
        grouped.setdefault(mark, []).append(phase)
    return grouped


def typical_seconds(runs: list[MarkedPhases]) -> dict[Mark, float]:
    """Seconds per mark: the median over the runs, of two runs the smaller (a machine stalls, it never hurries)."""
    seconds: dict[Mark, list[float]] = {}
    for run in runs:
        for mark, phases in by_mark(run).items():
            seconds.setdefault(mark, []).append(sum(phase.seconds for phase in phases))
    return {mark: statistics.median_low(values) for mark, values in seconds.items()}


def joined(phases: Sequence[Phase] | None, seconds: float) -> Phase:
    """Phases that follow each other as one, with its seconds, which another run has measured."""
    if not phases:
        return Phase(seconds=seconds)
    return Phase(
        start_bytes=phases[0].start_bytes,
        peak_bytes=max(phase.peak_bytes for phase in phases),
        end_bytes=phases[-1].end_bytes,
        seconds=seconds,
    )


def highest(phases: Sequence[Phase], seconds: float) -> Phase:
    """Phases of one kind as one that begins, reaches and ends at the most of them."""
    if not phases:
        return Phase()
    return Phase(
        start_bytes=max(phase.start_bytes for phase in phases),
        peak_bytes=max(phase.peak_bytes for phase in phases),
        end_bytes=max(phase.end_bytes for phase in phases),
        seconds=seconds,
    )


def extended(phase: Phase, following: Phase) -> Phase:
    """A phase and the one that follows it as one."""
    return joined([phase, following], phase.seconds + following.seconds)
