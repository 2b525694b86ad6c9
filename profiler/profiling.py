"""Profiling: a workload in, a Profile out; the model is left as it was found."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from profiler.meter import Interval, memory_meter, time_meter
from profiler.preservation import RandomState, preserved
from profiler.probe import BACKWARD, FORWARD, OPTIMIZER, FirstRun, Place, StepProbe, outside_place, stage_place
from profiler.records import OpRecord, Phase, Profile, ResidentBytes, StageRecord
from profiler.rerun import CallTraits, rerun_keeping, rerun_until_saved
from profiler.stages import ChosenStage, StagePattern, choose_stages
from profiler.storages import distinct_bytes
from profiler.tracing import Trace, trace_step
from profiler.trees import tensors_in
from profiler.workload import Workload

Progress = Callable[[str, int, int], None]
PLAIN_STEPS = 3
DROPPING_FORWARDS = 2
_RUNS = 4 + PLAIN_STEPS + DROPPING_FORWARDS


class ProfileError(ValueError):
    """The workload cannot be profiled; the message says what failed and what to do."""


@dataclass(slots=True, kw_only=True)
class _Measured:
    """Everything measured about one workload, before it is put together."""

    trace: Trace
    stages: tuple[ChosenStage, ...]
    memory: dict[str, list[Interval]]
    seconds: dict[str, float]
    step_seconds: list[float]
    dropped_memory: dict[str, list[Interval]]
    dropped_seconds: dict[str, float]
    freed: list[bool]
    reruns: dict[int, _Rerun]


@dataclass(slots=True, kw_only=True)
class _Rerun:
    seconds: float = 0.0
    failure: str = ""


def profile(
    workload: Workload,
    *,
    stages: Sequence[StagePattern] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measure one training step of a workload on the device it is on.

    Runs about ten steps: one to warm up, one traced, one with the memory
    meter, some timed, and forwards in which no stage keeps anything.
    Parameters, buffers, gradients, optimizer states, random states and
    train/eval flags are as before afterwards, also after an exception.

    Args:
        workload: the training step; its model in training mode.
        stages: None to find stages automatically; otherwise module names,
            glob patterns or module classes.
        progress: called as ``progress(what, done, total)`` before each run.

    Returns:
        The profile: bytes as exact integers, seconds as medians.

    Raises:
        ProfileError: the step fails, or the model is in eval mode.
        ValueError: a stage pattern matches nothing.
    """
    if not workload.model.training:
        raise ProfileError("profile: expected a model in training mode, got one in eval mode; call model.train()")
    report = _Reporter(progress)
    with preserved(workload):
        randomness = RandomState.capture()
        report("warm up")
        _first_step(workload)
        resident = _resident(workload)
        measured = _measure(workload, stages, resident.total, randomness, report)
        return _profile_of(workload, measured, resident)


class _Reporter:
    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0

    def __call__(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what, self._done, _RUNS)
        self._done += 1


def _first_step(workload: Workload) -> None:
    try:
        workload.step()
    except Exception as error:  # User code runs here; whatever it raises is reported as its failure.
        raise ProfileError(
            f"profile: expected a training step that runs, got {type(error).__name__}: {error}; "
            "correct the model, its inputs or the loss"
        ) from error
    workload.zero_grad()


def _resident(workload: Workload) -> ResidentBytes:
    states = workload.optimizer.state.values() if workload.optimizer is not None else ()
    return ResidentBytes(
        parameters=distinct_bytes(workload.model.parameters()),
        buffers=distinct_bytes(workload.model.buffers()),
        optimizer=distinct_bytes(v for state in states for v in state.values() if isinstance(v, Tensor)),
        inputs=distinct_bytes(tensors_in(workload.inputs)),
    )


def _measure(
    workload: Workload,
    patterns: Sequence[StagePattern] | None,
    resident_bytes: int,
    randomness: RandomState,
    report: _Reporter,
) -> _Measured:
    device = workload.device
    report("trace")
    randomness.restore()
    trace = trace_step(workload)
    stages = choose_stages(trace, patterns)
    traits = [_traits(stage) for stage in stages]
    with StepProbe(workload, stages) as probe:
        report("memory")
        randomness.restore()
        memory = probe.step(memory_meter(device, resident_bytes), mark_saves=True)
        report("memory, nothing kept")
        randomness.restore()
        dropped, _, freed = probe.dropping_forward(memory_meter(device, resident_bytes), traits, hold_all=False)
        dropped_seconds, reruns = _time_dropping(workload, probe, stages, traits, randomness, report)
        steps = []
        for _ in range(PLAIN_STEPS):
            report("time")
            randomness.restore()
            steps.append(probe.step(time_meter(device)))
    return _Measured(
        trace=trace,
        stages=stages,
        memory=_by_label(memory),
        seconds=_median_seconds(steps),
        step_seconds=[sum(i.seconds for i in step) for step in steps],
        dropped_memory=_by_label(dropped),
        dropped_seconds=dropped_seconds,
        freed=freed,
        reruns=reruns,
    )


def _time_dropping(
    workload: Workload,
    probe: StepProbe,
    stages: tuple[ChosenStage, ...],
    traits: list[CallTraits],
    randomness: RandomState,
    report: _Reporter,
) -> tuple[dict[str, float], dict[int, _Rerun]]:
    """Seconds of forwards without keeping, and of one rerun per distinct stage."""
    runs = []
    reruns: dict[int, _Rerun] = {}
    alike = _alike(stages)
    for _ in range(DROPPING_FORWARDS):
        report("time, nothing kept")
        randomness.restore()
        intervals, first_runs, _ = probe.dropping_forward(time_meter(workload.device), traits, hold_all=True)
        runs.append(intervals)
        if reruns:
            continue
        for position, number in enumerate(alike):
            if number not in reruns and position < len(first_runs):
                reruns[number] = _rerun(first_runs[position], workload.device)
    return _median_seconds(runs), reruns


def _rerun(first: FirstRun, device: torch.device) -> _Rerun:
    """Run a call again: does it give the same, and how long does it take?"""
    args, kwargs = first.arguments
    try:
        saved, output = rerun_keeping(first.call, first.state, args, kwargs)
        failure = _difference(first, saved, output, device)
        times = []
        for _ in range(2):
            _synchronize(device)
            begin = time.perf_counter()
            rerun_until_saved(first.call, first.state, args, kwargs, len(first.saved))
            _synchronize(device)
            times.append(time.perf_counter() - begin)
    except Exception as error:  # User code runs here: whatever it raises means that it cannot be run twice.
        return _Rerun(failure=f"running it a second time fails: {error}")
    return _Rerun(seconds=min(times), failure=failure)


def _difference(first: FirstRun, saved: list[Tensor], output: Any, device: torch.device) -> str:
    if [(tuple(t.shape), t.dtype) for t in saved] != first.saved:
        return "running it a second time saves other tensors (a cache or a counter changed; for transformers: use_cache)"
    for before, after in zip(tensors_in(first.output), tensors_in(output), strict=True):
        # GPU kernels may add in another order; a wrong mask or input differs by far more than this.
        same = torch.equal(before, after) if device.type == "cpu" else torch.allclose(before, after, rtol=0.05, atol=0.05)
        if not same:
            return "running it a second time gives another result"
    return ""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _traits(stage: ChosenStage) -> CallTraits:
    return CallTraits(draws_random=stage.call.draws_random, mutated_buffers=stage.call.mutated_buffers)


def _by_label(intervals: list[Interval]) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {}
    for interval in intervals:
        found.setdefault(interval.label, []).append(interval)
    return found


def _median_seconds(runs: list[list[Interval]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for run in runs:
        for label, intervals in _by_label(run).items():
            found.setdefault(label, []).append(sum(i.seconds for i in intervals))
    return {label: statistics.median(values) for label, values in found.items()}


def _alike(stages: Sequence[ChosenStage]) -> list[int]:
    """A number for each stage; equal where structure and shapes are equal."""
    numbers: dict[Any, int] = {}
    found = []
    for stage in stages:
        call = stage.call
        key = (
            type(call.module),
            tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in call.module.named_parameters()),
            tuple((leaf.shape, leaf.dtype) for leaf in call.inputs),
            call.end_op - call.first_op,
            call.end_save - call.first_save,
            call.draws_random,
        )
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _profile_of(workload: Workload, measured: _Measured, resident: ResidentBytes) -> Profile:
    optimizer = _phase(measured.memory.get(OPTIMIZER), measured.seconds.get(OPTIMIZER, 0.0))
    device = workload.device
    return Profile(
        model_class=type(workload.model).__name__,
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        torch_version=torch.__version__,
        precision=_precision(workload),
        stages=_Assembly(measured, resident.total).records(),
        resident=resident,
        optimizer=optimizer,
        unplanned_peak_bytes=max(i.peak_bytes for found in measured.memory.values() for i in found),
        unplanned_seconds=statistics.median(measured.step_seconds),
        step_seconds=tuple(measured.step_seconds),
        op_records=_op_records(measured),
    )


def _precision(workload: Workload) -> str:
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in workload.model.parameters()})
    cast = "" if workload.autocast is None else f", autocast {str(workload.autocast).removeprefix('torch.')}"
    return "+".join(kinds) + cast


def _phase(intervals: list[Interval] | None, seconds: float) -> Phase:
    if not intervals:
        return Phase(seconds=seconds)
    return Phase(
        start_bytes=intervals[0].start_bytes,
        peak_bytes=max(i.peak_bytes for i in intervals),
        end_bytes=intervals[-1].end_bytes,
        seconds=seconds,
    )


def _joined(first: Phase, second: Phase) -> Phase:
    return Phase(
        start_bytes=first.start_bytes,
        peak_bytes=max(first.peak_bytes, second.peak_bytes),
        end_bytes=second.end_bytes,
        seconds=first.seconds + second.seconds,
    )


class _Assembly:
    """Puts the phases of stages, and of what runs outside of them, together in forward order."""

    def __init__(self, measured: _Measured, resident_bytes: int) -> None:
        self._measured = measured
        self._alike = _alike(measured.stages)
        backward = [i for label, found in measured.memory.items() if label.startswith(BACKWARD) for i in found]
        self._after_backward = backward[-1].end_bytes if backward else resident_bytes
        self._records: list[StageRecord] = []

    def records(self) -> tuple[StageRecord, ...]:
        for k in range(len(self._measured.stages) + 1):
            self._add_outside(k)
            if k < len(self._measured.stages):
                self._records.append(self._stage(k))
        return tuple(self._records)

    def _phases(self, place: Place) -> tuple[Phase, Phase, Phase]:
        m = self._measured
        forward, backward = place.label(FORWARD), place.label(BACKWARD)
        after = Phase(
            start_bytes=self._after_backward, peak_bytes=self._after_backward, end_bytes=self._after_backward
        )
        return (
            _phase(m.memory.get(forward), self._pooled(m.seconds, place, FORWARD)),
            _phase(m.memory[backward], self._pooled(m.seconds, place, BACKWARD)) if backward in m.memory else after,
            _phase(m.dropped_memory.get(forward), self._pooled(m.dropped_seconds, place, FORWARD)),
        )

    def _pooled(self, seconds: dict[str, float], place: Place, phase: str) -> float:
        """A stage's seconds: the median over all stages like it."""
        if place.kind != "stage":
            return seconds.get(place.label(phase), 0.0)
        like = [k for k, number in enumerate(self._alike) if number == self._alike[place.index]]
        return statistics.median(seconds.get(stage_place(k).label(phase), 0.0) for k in like)

    def _add_outside(self, k: int) -> None:
        forward, backward, dropped = self._phases(outside_place(k))
        if self._records and outside_place(k).label(BACKWARD) not in self._measured.memory:
            last = self._records[-1]  # Nothing but Python letting go of tensors: part of the stage before.
            self._records[-1] = replace(
                last, forward=_joined(last.forward, forward), dropped=_joined(last.dropped, dropped)
            )
            return
        stages = self._measured.stages
        before = f"after {stages[k - 1].name}" if k == len(stages) and k > 0 else ""
        name = f"outside, {before or f'before {stages[k].name}'}" if stages else "the whole model"
        self._records.append(
            StageRecord(name=name, kind="outside", forward=forward, backward=backward, dropped=dropped)
        )

    def _stage(self, k: int) -> StageRecord:
        m, stage, place = self._measured, self._measured.stages[k], stage_place(k)
        call, table = stage.call, m.trace.storages
        forward, backward, dropped = self._phases(place)
        rerun = m.reruns.get(self._alike[k], _Rerun(failure="it was not run a second time"))
        saves = m.trace.saves[call.first_save : call.end_save]
        saved = {save.storage for save in saves if save.storage is not None} - m.trace.always_alive
        boundary = m.stages[k + 1].boundary_storages if k + 1 < len(m.stages) and m.freed[k + 1] else frozenset()
        inputs = {leaf.storage for leaf in call.inputs if leaf.storage is not None}
        outputs = {leaf.storage for leaf in call.outputs if leaf.storage is not None}
        parameters = dict(call.module.named_parameters())
        reason = self._reason(k, rerun)
        marks = m.memory.get(place.label(FORWARD), [])
        last_save_peak = max((i.peak_bytes for i in marks[:-1]), default=forward.start_bytes)
        return StageRecord(
            name=stage.name,
            kind="stage",
            module_class=type(call.module).__name__,
            alike=self._alike[k],
            forward=forward,
            backward=backward,
            dropped=dropped,
            # It is a part of that forward; a longer time can only be noise.
            recompute_seconds=min(rerun.seconds, dropped.seconds),
            recompute_peak_bytes=last_save_peak - forward.start_bytes,
            recompute_ops=saves[-1].op - call.first_op if saves else 0,
            forward_ops=call.end_op - call.first_op,
            output_bytes=table.total_bytes(outputs - inputs - m.trace.always_alive),
            boundary_bytes=table.total_bytes(boundary),
            kept_output_bytes=table.total_bytes(boundary & saved),
            kept_bytes=table.total_bytes(saved - inputs),
            saved_tensors=len(saves),
            links=stage.links,
            parameter_bytes=distinct_bytes(parameters.values()),
            parameter_gradient_bytes=distinct_bytes(p for p in parameters.values() if p.requires_grad),
            parameter_shapes=tuple((name, tuple(p.shape)) for name, p in parameters.items()),
            input_shapes=tuple(leaf.shape for leaf in call.inputs),
            draws_random=call.draws_random,
            mutated_buffers=call.mutated_buffers,
            recomputable=not reason,
            reason=reason,
        )

    def _reason(self, k: int, rerun: _Rerun) -> str:
        if self._measured.stages[k].call.mutates_input:
            return "it changes its input in place"
        if stage_place(k).label(BACKWARD) not in self._measured.memory:
            return "it has no backward"
        return rerun.failure


def _op_records(measured: _Measured) -> tuple[OpRecord, ...]:
    trace = measured.trace
    spans = [(s.name, s.call.first_node, s.call.end_node) for s in measured.stages]

    def place_of(node: int) -> str:
        return next((name for name, first, end in spans if first <= node < end), "outside")

    def place_at(position: int) -> str:
        for stage in measured.stages:
            if stage.call.first_op <= position < stage.call.end_op:
                return stage.name
        return "outside"

    forward = [
        OpRecord(
            side="forward",
            place=place_at(position),
            module=op.module,
            op=op.name,
            seconds=op.seconds,
            output_bytes=op.output_bytes,
            kept=op.kept,
        )
        for position, op in enumerate(trace.ops)
    ]
    backward = [
        OpRecord(
            side="backward",
            place=place_of(op.node),
            module=op.module,
            op=op.name,
            seconds=op.seconds,
            output_bytes=op.output_bytes,
            kept=False,
        )
        for op in trace.backward_ops
    ]
    return tuple(forward + backward)
