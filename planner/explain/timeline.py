"""Timelines: the bytes alive over one training step, action by action, predicted or measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from planner.pictures import AxisUnits, units_up_to
from planner.plans.plan import Plan
from solvers import Chain, Schedule, replay
from solvers.chain import baselines
from solvers.problem.chain import Link
from solvers.problem.schedule import RUNS, ActionKind
from solvers.problem.simulator import Copy, ReplayedAction

if TYPE_CHECKING:
    import pandas as pd

PhaseName = Literal["forward", "backward", "optimizer"]
SpanKind = ActionKind | Literal["loss", "optimizer"]
_TIMES, _SIZES = ("start_seconds", "seconds"), ("bytes_before", "bytes_peak", "bytes_after")
COLUMNS = ("series", "phase", "stage", "action", *_TIMES, *_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of a step: when it runs, and the bytes alive before, at its peak, and after it.

    ``recompute`` is any run of a stage but its first. Its first ``stall_seconds`` it waits for a copy.
    ``again_seconds`` are what a backward takes more than that of a stage which keeps everything: for ops that run again
    in it.
    """

    phase: PhaseName
    stage: str
    action: SpanKind
    start_seconds: float
    end_seconds: float
    before_bytes: int
    peak_bytes: int
    after_bytes: int
    stall_seconds: float = 0.0
    again_seconds: float = 0.0

    @property
    def middle_seconds(self) -> float:
        """When it has its peak, as pictures have it."""
        return (self.start_seconds + self.end_seconds) / 2


class Lane(NamedTuple):
    """The times at which one kind of action runs; ``row`` is what runs it: ``compute``, or copies in one direction."""

    row: str
    action: str
    seconds: list[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step, from its first forward to the end of the optimizer's step, and the copies to and from host memory."""

    source: Literal["predicted", "measured"]
    planned: bool
    spans: tuple[Span, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def series(self) -> str:
        """The name in tables: for example ``predicted_planned``."""
        return f"{self.source}_{'planned' if self.planned else 'unplanned'}"

    @property
    def peak(self) -> Span:
        """The first of the actions with the highest peak."""
        return max(self.spans, key=lambda span: span.peak_bytes)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.spans[-1].end_seconds

    @property
    def name(self) -> str:
        """The name in pictures: for example ``measured with the plan``."""
        return f"{'measured ' if self.source == 'measured' else ''}{'with' if self.planned else 'without'} the plan"

    def points(self) -> list[tuple[float, int]]:
        """Three points of each action: seconds and bytes at its start, its peak and its end."""
        return [
            point
            for span in self.spans
            for point in (
                (span.start_seconds, span.before_bytes),
                (span.middle_seconds, span.peak_bytes),
                (span.end_seconds, span.after_bytes),
            )
        ]

    def lanes(self) -> list[Lane]:
        """The lanes of a step: one for each kind of action, then one for copies in each direction."""
        times: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for span in self.spans:
            action = "backward, some ops recomputed" if span.again_seconds > 0 else span.action
            begin = span.start_seconds + span.stall_seconds
            if span.stall_seconds > 0:
                times.setdefault(("compute", "waits for a copy"), []).append((span.start_seconds, begin))
            if span.end_seconds > begin and span.action in ("forward", "recompute", "loss", "backward", "optimizer"):
                lane = times.setdefault(("compute", "backward" if action == "loss" else action), [])
                lane.append((begin, span.end_seconds))
        for copy in self.copies:
            direction = copy.direction.replace("_", " ")
            times.setdefault((direction, direction), []).append((copy.begin_seconds, copy.end_seconds))
        return [Lane(row, action, _merged(seconds)) for (row, action), seconds in times.items()]


def _merged(times: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches of time, those without a gap between them as one."""
    merged: list[tuple[float, float]] = []
    for begin, end in times:
        if merged and begin - merged[-1][1] < 1e-9:
            begin = merged.pop()[0]
        merged.append((begin, end))
    return merged


def side_by_side(timelines: Iterable[Timeline]) -> list[Timeline]:
    """Measured steps with their actions at the times of the predicted ones: else only seconds were compared."""
    timelines = list(timelines)
    predicted = {timeline.planned: timeline for timeline in timelines if timeline.source == "predicted"}
    return [
        aligned(timeline, predicted[timeline.planned])
        if timeline.source == "measured" and timeline.planned in predicted
        else timeline
        for timeline in timelines
    ]


def units_of(timelines: Sequence[Timeline], budget_bytes: int) -> AxisUnits:
    """The units of axes that hold some timelines and the budget."""
    largest = max([budget_bytes, *(timeline.peak.peak_bytes for timeline in timelines)])
    return units_up_to(largest, max(timeline.seconds for timeline in timelines))


def aligned(measured: Timeline, predicted: Timeline) -> Timeline:
    """A measured step with its actions at the times at which a predicted one has them.

    What the prediction does not have lies between its neighbours, as far along as it was measured. Where the two have
    no action in common, the step stays as it is.
    """
    places = _occurrences(predicted)
    points = [(0.0, 0.0)]
    for key, span in _occurrences(measured).items():
        if key in places:
            place = places[key]
            points += [(span.start_seconds, place.start_seconds), (span.end_seconds, place.end_seconds)]
    if len(points) == 1:
        return measured
    times, places_of_times = np.maximum.accumulate(sorted(points)).T

    def moved(seconds: float) -> float:
        return float(np.interp(seconds, times, places_of_times))

    spans = measured.spans
    moved_spans = (replace(s, start_seconds=moved(s.start_seconds), end_seconds=moved(s.end_seconds)) for s in spans)
    return replace(measured, spans=tuple(moved_spans))


def _occurrences(timeline: Timeline) -> dict[tuple[str, str, str, int], Span]:
    """The spans by what they do, and how many of the same came before."""
    counts: Counter[tuple[str, str, str]] = Counter()
    found = {}
    for span in timeline.spans:
        key = span.phase, span.stage, span.action
        found[(*key, counts[key])] = span
        counts[key] += 1
    return found


def predicted_timelines(
    chain: Chain, schedule: Schedule, *, link: Link | None = None, seconds_outside_chain: float = 0.0
) -> list[Timeline]:
    """The step that keeps everything, and the one that follows ``schedule``.

    Args:
        chain: what the stages cost.
        schedule: of its stages.
        link: over which it sends offload units to host memory.
        seconds_outside_chain: of the step outside of the chain: the optimizer's.
    """
    return [
        _predicted(
            chain, baselines.keep_all(chain)[0], None, planned=False, seconds_outside_chain=seconds_outside_chain
        ),
        _predicted(chain, schedule, link, planned=True, seconds_outside_chain=seconds_outside_chain),
    ]


def seconds_outside_chain_of(plan: Plan, chain: Chain) -> float:
    """Seconds of a step that lie outside of forward and backward; noise may make the measured ones negative."""
    return max(0.0, plan.seconds_outside(chain))


def _predicted(
    chain: Chain, schedule: Schedule, link: Link | None, *, planned: bool, seconds_outside_chain: float
) -> Timeline:
    spans: list[Span] = []
    seen: set[int] = set()
    options: dict[int, int] = {}  # that each stage goes backward with
    now = 0.0
    phase: PhaseName = "forward"
    replayed = replay(chain, schedule, link)
    for moment in replayed.timeline:
        kind, again = moment.action.kind, moment.action.stage in seen
        if kind in ("backward", "recompute") or (kind == "forward" and again):
            phase = "backward"  # What runs again before the first backward belongs to it.
        elif kind == "forward":
            seen.add(moment.action.stage)
        if kind in RUNS and moment.action.option is not None:
            options[moment.action.stage] = moment.action.option
        span = _span(chain, moment, phase, now, again=again)
        inside = _again_seconds(chain, moment.action.stage, options) if kind == "backward" else 0.0
        spans.append(replace(span, again_seconds=inside))
        now += moment.seconds
    if chain.optimizer_peak_bytes:
        spans.append(_optimizer(chain, spans[-1].after_bytes, now, seconds_outside_chain))
    return Timeline(source="predicted", planned=planned, spans=tuple(spans), copies=replayed.copies)


def _again_seconds(chain: Chain, stage: int, options: Mapping[int, int]) -> float:
    kept, *_ = choices = chain.stages[stage].options
    return max(0.0, choices[options.get(stage, 0)].backward_seconds - kept.backward_seconds)


def _span(chain: Chain, moment: ReplayedAction, phase: PhaseName, start: float, *, again: bool) -> Span:
    kind = moment.action.kind
    return Span(
        phase=phase,
        stage=chain.stages[moment.action.stage].name,
        action="recompute" if kind == "forward" and again else kind,
        start_seconds=start,
        end_seconds=start + moment.seconds,
        before_bytes=moment.before_bytes,
        peak_bytes=moment.peak_bytes,
        after_bytes=moment.after_bytes,
        stall_seconds=moment.stall_seconds,
    )


def _optimizer(chain: Chain, before_bytes: int, start: float, seconds: float) -> Span:
    return Span(
        phase="optimizer",
        stage="",
        action="optimizer",
        start_seconds=start,
        end_seconds=start + seconds,
        before_bytes=before_bytes,
        peak_bytes=max(before_bytes, chain.optimizer_peak_bytes),
        after_bytes=before_bytes,
    )


def timeline_table(timelines: Iterable[Timeline]) -> pd.DataFrame:
    """All timelines as one table.

    Columns: ``series`` (``predicted`` or ``measured``, ``planned`` or
    ``unplanned``), ``phase``, ``stage`` (empty for the optimizer), ``action``,
    ``start_seconds`` and ``seconds`` (since the step began, at the action's
    start and end), ``bytes_before``, ``bytes_peak``, ``bytes_after``.
    """
    import pandas as pd

    rows = [_row(timeline.series, span) for timeline in timelines for span in timeline.spans]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(series: str, span: Span) -> Sequence[str | float | int]:
    sizes = (span.before_bytes, span.peak_bytes, span.after_bytes)
    return series, span.phase, span.stage, span.action, span.start_seconds, span.end_seconds, *sizes
