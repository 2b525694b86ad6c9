"""The report of a step that ran out of memory: where it was, what was predicted there, and what was really alive."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.sizes import format_bytes
from planner.timeline import Kind, Phase

_CUDA = re.compile(r"Tried to allocate ([0-9.]+) (KiB|MiB|GiB|bytes)")
_CPU = re.compile(r"tried to allocate ([0-9]+) bytes")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_LAST = 6  # actions before the failure that a person gets to see


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """What an error says by itself.

    Attributes:
        step: the training step, from 1; while its memory is measured beforehand, the next one.
        phase: that the step was in; None where it was being measured.
        stage: named by the error's traceback; empty where it names none.
        message: its first line.
        allocation_bytes: that was refused; None where the message does not say.
    """

    step: int
    phase: Phase | None
    stage: str
    message: str
    allocation_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """One action of the step: the most bytes alive during it; ``predicted_bytes`` is None where the plan has no such.

    ``actual_bytes`` of the action that failed does not have the allocation that was refused.
    """

    phase: Phase
    stage: str
    action: Kind
    predicted_bytes: int | None
    actual_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """One time that training ran out of memory.

    Attributes:
        step: the training step, from 1.
        phase: forward, backward or optimizer; None where it is not known.
        stage: that was running; empty for the optimizer, and where it is not known.
        predicted_bytes: most bytes alive there, by the plan.
        actual_bytes: most bytes that were really alive there; the refused allocation is not among them.
        allocation_bytes: that was refused; None where the device does not say.
        message: the error's first line.
        timeline: the step's actions up to the failure, from running the step once more under a meter.
        repeated: whether it failed once more then; if not, the timeline is of a whole step.
        restored: whether parameters, buffers, optimizer states and random states are as before a step. False: the
            optimizer's step had begun, and no copy was kept.
        budget_bytes, headroom_bytes, predicted_peak_bytes: of the plan.
        next_budget_bytes: of the plan to go on with; None where there is none.
        why_not: why there is none; empty where there is one.
    """

    step: int
    phase: Phase | None
    stage: str
    predicted_bytes: int | None
    actual_bytes: int | None
    allocation_bytes: int | None
    message: str
    timeline: tuple[Alive, ...]
    repeated: bool
    restored: bool
    budget_bytes: int
    headroom_bytes: int
    predicted_peak_bytes: int
    next_budget_bytes: int | None = None
    why_not: str = ""


class OutOfMemory(torch.OutOfMemoryError):
    """Training under a plan ran out of memory and was not, or not again, retried.

    Attributes:
        reports: of each failure, the last one last.
        losses: of the training steps before.
    """

    def __init__(self, reports: Sequence[FailureReport], losses: Sequence[float]) -> None:
        self.reports = tuple(reports)
        self.losses = tuple(losses)
        super().__init__(failure_text(self.reports[-1]))


def allocation_in(message: str) -> int | None:
    """Bytes of the allocation that an error's message says was refused.

    >>> allocation_in("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ..."), allocation_in("no")
    (1610612736, None)
    """
    if found := _CUDA.search(message):
        return int(float(found[1]) * _UNITS[found[2]])
    found = _CPU.search(message)
    return int(found[1]) if found else None


def failure_text(report: FailureReport) -> str:
    """What a person reads of it: place, bytes, the last actions, and what comes next."""
    lines = [
        f"step {report.step}, {_place(report)}: {report.message}",
        f"predicted there {_size(report.predicted_bytes)}, really alive {_size(report.actual_bytes)}, "
        f"refused {_size(report.allocation_bytes)}; budget {_size(report.budget_bytes)}, "
        f"headroom {_size(report.headroom_bytes)}",
        *_actions(report),
        _state(report),
    ]
    return "\n".join(lines)


def _place(report: FailureReport) -> str:
    if report.phase is None:
        return "at a place that is not known"
    return f"{report.phase} of {report.stage}" if report.stage else report.phase


def _actions(report: FailureReport) -> list[str]:
    if not report.timeline:
        return []
    shown = report.timeline[-_LAST:] if report.repeated else ()
    if not shown:
        return ["run once more, the step did not fail"]
    return [
        f"  {row.phase} {row.stage or ''} {row.action}: predicted {_size(row.predicted_bytes)}, "
        f"alive {_size(row.actual_bytes)}"
        for row in shown
    ]


def _state(report: FailureReport) -> str:
    state = (
        "nothing was lost: model, optimizer and random states are as before a step"
        if report.restored
        else "the optimizer's step had begun and may be half done: load a checkpoint; --retry keeps a copy"
    )
    if report.next_budget_bytes is not None:
        return f"{state}; trying again with a plan for {_size(report.next_budget_bytes)}"
    return f"{state}; {report.why_not}"


def _size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{format_bytes(size_bytes)} ({size_bytes:,} bytes)"


def failure_document(report: FailureReport) -> dict[str, Any]:
    """The same for programs."""
    return dataclasses.asdict(report)
