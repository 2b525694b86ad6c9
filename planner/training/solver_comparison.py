"""Every solver's plan for one budget applied to the model in turn, predicted beside measured."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.plans.solving import COMPARE_SECONDS, solve
from planner.runtime.applier import apply, measure
from profiler.measurement.measuring import Progress
from profiler.measurement.meter import metered, time_meter
from profiler.measurement.step_measurement import Measurement
from profiler.records import Profile
from profiler.workload.random_states import RandomState
from profiler.workload.snapshot import preserved
from profiler.workload.steps import first_step
from profiler.workload.workload import Workload

SOLVERS = ("keep_all", "recompute_all", "chen_sqrt", "chen_greedy", "rotor")
ILP_STAGES = 16  # what ilp mostly proves within its limit; a longer chain would make everybody wait for it
ROUNDS = 5  # timed steps per row; the rows take turns, so a slow moment of the machine hits them all


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One solver's answer to the budget; ``none`` is the unplanned model, not measured where its step does not fit.

    ``reserved_bytes`` is what the allocator held for the peak, None on the CPU.
    Numbers are None where no plan fits; then ``minimum_budget_bytes`` and
    ``reason`` say what would.
    """

    solver: str
    status: str
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    reserved_bytes: int | None = None
    minimum_budget_bytes: int | None = None
    reason: str | None = None

    @property
    def status_in_words(self) -> str:
        """The status as tables say it: one method that has no plan for a budget proves nothing for the others."""
        return "does not fit" if self.status == "unknown" else self.status


def compare_solvers(
    workload: Workload,
    profile: Profile,
    budget_bytes: int,
    *,
    time_limit_seconds: float = COMPARE_SECONDS,
    progress: Progress | None = None,
) -> list[ComparisonRow]:
    """Plan with every solver, apply each plan, and measure peaks and (in turns) seconds.

    The workload is left as it was found. ``ilp`` takes part for chains of up to 16 stages.

    Args:
        workload: the training step that ``profile`` was made from.
        profile: its profile.
        budget_bytes: the budget that every solver gets.
        time_limit_seconds: for ``ilp`` and ``auto``.
        progress: called as ``progress(what, done, total)`` before each part.

    Returns:
        The unplanned model's row, then one per solver.
    """
    report = progress or (lambda what, done, total: None)
    names = [*SOLVERS, *(["ilp"] if len(profile.stages) <= ILP_STAGES else []), "auto"]
    total = 2 * len(names) + 1 + ROUNDS
    answers: dict[str, Plan | Infeasible | None] = {"none": None}
    for done, name in enumerate(names):
        report(f"solve {name}", done, total)
        answers[name] = _answer(profile, budget_bytes, name, time_limit_seconds)
    peaks: dict[str, Measurement] = {}
    for done, (name, answer) in enumerate(answers.items(), start=len(names)):
        report(f"peak {name}", done, total)
        if not isinstance(answer, Infeasible) and not (answer is None and profile.frugal):
            with _planned(workload, answer):
                peaks[name] = measure(workload, repeats=1)
    rest = total - ROUNDS
    plans = {name: answer for name, answer in answers.items() if name in peaks and not isinstance(answer, Infeasible)}
    seconds = seconds_in_turns(workload, plans, progress=lambda done: report("time", rest + done, total))
    return [_row(profile, name, answer, peaks, seconds) for name, answer in answers.items()]


def _answer(profile: Profile, budget_bytes: int, solver: str, time_limit_seconds: float) -> Plan | Infeasible:
    try:
        return solve(profile, budget_bytes, solver=solver, time_limit_seconds=time_limit_seconds)
    except Infeasible as refusal:
        return refusal


def _planned(workload: Workload, plan: Plan | None) -> AbstractContextManager[Any]:
    return contextlib.nullcontext() if plan is None else apply(workload.model, plan)


def seconds_in_turns(
    workload: Workload, plans: Mapping[str, Plan | None], *, progress: Callable[[int], None] | None = None
) -> dict[str, float]:
    """Median seconds of a step under each plan (None: unplanned), two steps of each per round: the second one counts.

    The first one meets the allocator as the plan before has left it: after a step that took more memory it need not
    get any from the system. Seconds from one run may be compared; seconds from two runs meet two moods of the machine.
    """
    times: dict[str, list[float]] = {name: [] for name in plans}
    with preserved(workload):
        randomness = RandomState()
        with _planned(workload, next(iter(plans.values()), None)):  # The unplanned step comes first where it fits.
            first_step(workload)  # so that no row pays for making the optimizer's states
        for done in range(ROUNDS):
            if progress is not None:
                progress(done)
            for name, plan in plans.items():
                with _planned(workload, plan):
                    for _ in range(2):
                        randomness.restore()
                        workload.zero_grad()
                        step = metered(time_meter(workload.device), workload.step)
                times[name].append(step.seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _row(
    profile: Profile,
    name: str,
    answer: Plan | Infeasible | None,
    peaks: dict[str, Measurement],
    seconds: dict[str, float],
) -> ComparisonRow:
    if isinstance(answer, Infeasible):
        return ComparisonRow(
            solver=name,
            status=answer.status,
            minimum_budget_bytes=answer.minimum_budget_bytes,
            reason=answer.reason,
        )
    return ComparisonRow(
        solver=name,
        status=("computed" if profile.frugal else "unplanned") if answer is None else answer.status,
        predicted_peak_bytes=profile.unplanned_peak_bytes if answer is None else answer.predicted_peak_bytes,
        measured_peak_bytes=peaks[name].peak_bytes if name in peaks else None,
        reserved_bytes=peaks[name].reserved_bytes if name in peaks else None,
        predicted_seconds=profile.unplanned_seconds if answer is None else answer.predicted_seconds,
        measured_seconds=seconds.get(name),
    )
