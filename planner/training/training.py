"""Training under a plan: real steps of a workload, with the measured peak and seconds beside the predicted ones."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from planner.distributed.ranks import RankError, current_ranks
from planner.plans.plan import Plan
from planner.runtime.applier import Backend, apply, measure
from planner.runtime.plan_checks import check_device, check_inputs, check_precision
from planner.training.oom_recovery import StepRollback, report_of, smaller_plan, stop_of, wanted_bytes
from planner.training.oom_report import FailureReport, Stop, failure_text
from planner.units import counted
from profiler.measurement.device_memory import give_back_freed_memory, is_short, ran_out
from profiler.measurement.step_measurement import Measurement
from profiler.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """The result of training under a plan.

    Attributes:
        plan: the plan that was applied, after retries the last one.
        losses: the loss of each training step.
        step_seconds: wall-clock seconds of each training step; the first one also allocates optimizer states.
        measured_peak_bytes: most bytes alive at once in a whole step.
        rank_peak_bytes: the peak of each rank where several train together; ``measured_peak_bytes`` is the highest.
        measured_seconds: median seconds of a step, by the same meter as the profile's.
        allocated_bytes, reserved_bytes: most bytes that the allocator handed out for that, and that it held of the
            device; None on the CPU.
        cache_flushes: how often the device had no memory left while that was measured, until the allocator gave back
            what it cached; 0 on the CPU.
        faulted_bytes: bytes that a step gets anew from the system, since the allocator gave them back; None on CUDA.
        failures: each time that memory ran out and a smaller plan was tried.
    """

    plan: Plan
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    measured_peak_bytes: int
    measured_seconds: float
    rank_peak_bytes: tuple[int, ...] = ()
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    faulted_bytes: int | None = None
    cache_flushes: int = 0
    failures: tuple[FailureReport, ...] = ()


class OutOfMemory(torch.OutOfMemoryError):
    """Training under a plan ran out of memory, and no retry was left.

    Attributes:
        reports: one for each failure, in order.
        losses: the loss of each training step before.
    """

    def __init__(self, reports: Sequence[FailureReport], losses: Sequence[float]) -> None:
        self.reports = tuple(reports)
        self.losses = tuple(losses)
        super().__init__(failure_text(self.reports[-1]))


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C ended training.

    Attributes:
        losses: the losses of the steps until then.
        step_seconds: wall-clock seconds of each.
        plan: the plan of the last one.
    """

    def __init__(self, losses: Sequence[float], step_seconds: Sequence[float], plan: Plan) -> None:
        self.losses, self.step_seconds, self.plan = tuple(losses), tuple(step_seconds), plan
        super().__init__(f"training: interrupted after {counted(len(self.losses), 'step')}")


def train_planned(
    workload: Workload,
    plan: Plan,
    *,
    steps: int,
    backend: Backend = "eager",
    retries: int = 0,
    on_failure: Callable[[FailureReport], None] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> TrainingRun:
    """Apply ``plan``, measure a step, train ``steps`` steps, and take the plan off.

    Measuring leaves the workload as it was, so the losses are those of training alone. Where memory runs out, the
    failed step is undone; with ``retries`` a plan for a smaller budget is made from the chain in ``plan``, and training
    goes on, with the losses of a run without failure.

    Args:
        workload: the training step.
        plan: a plan for it.
        steps: the number of steps to train.
        backend: as for ``apply``.
        retries: how many smaller plans to try. Above 0, model and optimizer states are copied to host memory, so that
            an optimizer's step that fails half way can be undone, too.
        on_failure: called with each failure that is followed by a retry.
        on_step: called after each step with its number, from 1, and its loss.

    Raises:
        TrainingInterrupted: by Ctrl-C; carries the losses until then.
        OutOfMemory: memory ran out, and no retry or no smaller plan is left; carries the reports.
        PlanMismatch: a plan for another model or another precision.
        RankError: memory ran out on this one of several ranks; the other ranks cannot continue.
        ValueError: no steps, a plan for another kind of device, retries on several ranks, a backend that the plan or
            the device has not, or a step that fails.
    """
    if steps < 1:
        raise ValueError(f"--steps: expected at least 1, got {steps}; give a whole number above zero")
    if retries < 0:
        raise ValueError(f"--retry: expected a number of retries, got {retries}; give 0 or more")
    if retries and current_ranks() is not None:
        raise ValueError(
            "--retry: several ranks cannot retry, since one that runs out of memory leaves the others in the middle of "
            "their step; leave it out, and solve for a smaller budget"
        )
    check_device(workload, plan)
    if is_short(plan.predicted_peak_bytes):
        give_back_freed_memory(workload.device)
    check_precision(workload.model, plan.precision, workload.autocast)
    training = _Training(workload, steps, backend=backend, copies=retries > 0, on_step=on_step)
    try:
        return _train(training, plan, retries, on_failure)
    except KeyboardInterrupt as interrupt:
        raise TrainingInterrupted(training.losses, training.seconds, training.plan or plan) from interrupt


def _train(
    training: _Training,
    plan: Plan,
    retries: int,
    on_failure: Callable[[FailureReport], None] | None,
) -> TrainingRun:
    failures: list[FailureReport] = []
    while (stop := training.attempt(plan)) is not None:
        report, smaller = training.recover(plan, stop, retry=len(failures) < retries)
        failures.append(report)
        if smaller is None:
            raise OutOfMemory(failures, training.losses)
        if on_failure is not None:
            on_failure(report)
        plan = smaller
    assert training.measured is not None
    return TrainingRun(
        plan=plan,
        losses=tuple(training.losses),
        step_seconds=tuple(training.seconds),
        measured_peak_bytes=training.measured.peak_bytes,
        rank_peak_bytes=training.measured.rank_peak_bytes,
        measured_seconds=training.measured.seconds,
        allocated_bytes=training.measured.allocated_bytes,
        reserved_bytes=training.measured.reserved_bytes,
        faulted_bytes=training.measured.faulted_bytes,
        cache_flushes=training.measured.cache_flushes,
        failures=tuple(failures),
    )


class _Training:
    """The trained steps of all attempts."""

    def __init__(
        self,
        workload: Workload,
        steps: int,
        *,
        backend: Backend,
        copies: bool,
        on_step: Callable[[int, float], None] | None,
    ) -> None:
        self._backend: Backend = backend
        self._on_step = on_step
        self.plan: Plan | None = None
        self._workload = workload
        self._steps = steps
        self._guard = StepRollback(workload, copies=copies)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.measured: Measurement | None = None

    def attempt(self, plan: Plan) -> Stop | None:
        """Measure, and train the steps that are left; returns where memory ran out, if it did."""
        self.measured, self.plan = None, plan
        try:
            with apply(self._workload.model, plan, backend=self._backend):
                check_inputs(self._workload, plan)
                self.measured = measure(self._workload)
                while len(self.losses) < self._steps:
                    self._train_one()
        except (RuntimeError, MemoryError, ValueError) as error:
            if not ran_out(error):
                raise
            if (ranks := current_ranks()) is not None:  # They are in the middle of their step: it is not run again.
                raise _out_of_memory_on(ranks.rank, len(self.losses) + 1, plan, error) from error
            step, phase = len(self.losses) + 1, None if self.measured is None else self._guard.phase
            return stop_of(error, self._workload.model, plan, step=step, phase=phase)
        return None

    def _train_one(self) -> None:
        begin = time.perf_counter()
        step = len(self.losses)
        self.losses.append(_checked(step + 1, lambda: self._guard.run(step)))
        _wait_for(self._workload.device)
        self.seconds.append(time.perf_counter() - begin)
        if self._on_step is not None:
            self._on_step(step + 1, self.losses[-1])

    def recover(self, plan: Plan, stop: Stop, *, retry: bool) -> tuple[FailureReport, Plan | None]:
        """Undo the failed step; returns its report and, where a retry is wanted and possible, the next plan."""
        gc.collect()  # What the error's frames held in cycles goes before anything is measured.
        done = len(self.losses) if self.measured is None else self._guard.undo()
        if self._workload.device.type == "cuda":
            torch.cuda.empty_cache()
        if done is not None:
            del self.losses[done:], self.seconds[done:]
        report = report_of(self._workload, plan, stop, restored=done is not None)
        gc.collect()  # That step has failed, too, and the solver needs memory as well.
        if done is None or not retry:
            return replace(report, why_not=_by_hand(plan, report)), None
        try:
            smaller = smaller_plan(plan, report)
        except ValueError as error:
            return replace(report, why_not=str(error)), None
        return replace(report, next_budget_bytes=smaller.budget_bytes), smaller


def _out_of_memory_on(rank: int, step: int, plan: Plan, error: BaseException) -> RankError:
    return RankError(
        f"train: rank {rank} ran out of memory in training step {step}, which is predicted to take "
        f"{plan.predicted_peak_bytes} bytes: {str(error).splitlines()[0]}; solve for a smaller budget, and start all "
        "ranks again",
        rank,
    )


def _by_hand(plan: Plan, report: FailureReport) -> str:
    budget_bytes = wanted_bytes(plan, report) + plan.headroom_bytes
    return (
        f"not tried again: planner solve PROFILE --budget {budget_bytes} makes a smaller plan; train --retry N "
        "tries up to N by itself"
    )


def _checked(step: int, run: Callable[[], float]) -> float:
    try:
        return run()
    except Exception as error:  # User code runs here; whatever it raises is reported as its failure.
        if ran_out(error):
            raise
        raise ValueError(
            f"training step {step} failed with {type(error).__name__}: {error}; "
            "correct the model, its inputs or the loss"
        ) from error


def train_steps(workload: Workload, steps: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Train ``steps`` steps on the workload's batch; the loss and the wall-clock seconds of each.

    Raises:
        ValueError: a step fails.
    """
    losses, seconds = [], []
    for step in range(steps):
        begin = time.perf_counter()
        losses.append(_checked(step + 1, workload.step))  # reading the loss waits for the forward
        _wait_for(workload.device)
        seconds.append(time.perf_counter() - begin)
    return tuple(losses), tuple(seconds)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
