"""The report of a step that ran out of memory: where it was, what was predicted there, and what was really alive."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from planner.explain.timeline import PhaseName, SpanKind
from planner.units import exact_bytes, format_bytes

_CUDA = re.compile(r"Tried to allocate ([0-9.]+) (KiB|MiB|GiB|bytes)")
_CPU = re.compile(r"tried to allocate ([0-9]+) bytes")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_LAST = 6  # actions before the failure that a person gets to see


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The facts in an error.

    Attributes:
        step: the training step, from 1; while its memory is measured beforehand, the next one.
        phase: the phase of the step; None where it was being measured.
        stage: the stage in the error's traceback; empty where there is none.
        message: its first line.
        allocation_bytes: the refused allocation; None where the message does not say.
    """

    step: int
    phase: PhaseName | None
    stage: str
    message: str
    allocation_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMemory:
    """One action of the step: the most bytes alive during it; ``predicted_bytes`` is None where the plan has no such.

    ``actual_bytes`` of the action that failed does not have the allocation that was refused.
    """

    phase: PhaseName
    stage: str
    action: SpanKind
    predicted_bytes: int | None
    actual_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """One time that training ran out of memory.

    Attributes:
        step: the training step, from 1.
        phase: forward, backward or optimizer; None where it is not known.
        stage: the stage that ran; empty for the optimizer, and where it is not known.
        predicted_bytes: most bytes alive there, by the plan.
        actual_bytes: most bytes that were really alive there; the refused allocation is not among them.
        allocation_bytes: the refused allocation; None where the device does not say.
        message: the error's first line.
        timeline: the step's actions up to the failure, from repeating the step under a meter.
        repeated: whether it failed then, too; if not, the timeline is of a whole step.
        restored: whether parameters, buffers, optimizer states and random states are as before a step. False: the
            optimizer's step had begun, and no copy was kept.
        budget_bytes, headroom_bytes, predicted_peak_bytes: of the plan.
        next_budget_bytes: of the plan to go on with; None where there is none.
        why_not: why there is none; empty where there is one.
    """

    step: int
    phase: PhaseName | None
    stage: str
    predicted_bytes: int | None
    actual_bytes: int | None
    allocation_bytes: int | None
    message: str
    timeline: tuple[ActionMemory, ...]
    repeated: bool
    restored: bool
    budget_bytes: int
    headroom_bytes: int
    predicted_peak_bytes: int
    next_budget_bytes: int | None = None
    why_not: str = ""


def allocation_in(message: str) -> int | None:
    """Bytes of the allocation that an error's message says was refused.

    >>> allocation_in("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ..."), allocation_in("no")
    (1610612736, None)
    """
    if match := _CUDA.search(message):
        return int(float(match[1]) * _UNITS[match[2]])
    match = _CPU.search(message)
    return int(match[1]) if match else None


def failure_text(report: FailureReport) -> str:
    """The report as text: place, bytes, the last actions, and the next step."""
    more = "" if report.allocation_bytes is None else f"; another {_both(report.allocation_bytes)} was refused"
    headroom = f", {_both(report.headroom_bytes)} of it headroom" if report.headroom_bytes else ""
    return "\n".join(
        [
            f"step {report.step}, {_place(report)}: {report.message}",
            f"  really alive there  {_both(report.actual_bytes)}{more}",
            f"  predicted there     {_both(report.predicted_bytes)}; at the peak {_both(report.predicted_peak_bytes)}",
            f"  budget              {_both(report.budget_bytes)}{headroom}",
            *_actions(report),
            *_next(report),
        ]
    )


def _place(report: FailureReport) -> str:
    again = report.repeated and bool(report.timeline) and report.timeline[-1].action == "recompute"
    if report.phase is None:
        return f"in {report.stage!r}" if report.stage else "at a place that the error does not name"
    return _words(report.phase, report.stage, again=again)


def _words(phase: PhaseName, stage: str, *, again: bool) -> str:
    if not stage:
        return phase
    return f"{phase}, {stage!r} running again" if again else f"{phase} of {stage!r}"


def _actions(report: FailureReport) -> list[str]:
    """The last actions as a table; they are those of the failure only where it came once more under the meter."""
    if not report.repeated:
        return ["run once more under a meter, the step did not fail"] if report.timeline else []
    shown = report.timeline[-_LAST:]
    places = [_words(row.phase, row.stage, again=row.action == "recompute") for row in shown]
    width = max(map(len, places), default=0)
    rows = [
        f"  {place:<{width}}  {_size(row.predicted_bytes):>9} predicted  {_size(row.actual_bytes):>9} alive"
        for place, row in zip(places, shown, strict=True)
    ]
    return ["the last actions, run once more under a meter:", *rows] if rows else []


def _next(report: FailureReport) -> list[str]:
    state = (
        "nothing was lost: model, optimizer and random states are as before a step"
        if report.restored
        else "the optimizer's step had begun and may be half done: load a checkpoint; --retry keeps a copy"
    )
    if report.next_budget_bytes is not None:
        return [state, f"trying again with a plan for {_both(report.next_budget_bytes)}"]
    return [state, report.why_not]


def _size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else format_bytes(size_bytes)


def _both(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else exact_bytes(size_bytes)


def failure_document(report: FailureReport) -> dict[str, Any]:
    """The same for programs."""
    return dataclasses.asdict(report)
