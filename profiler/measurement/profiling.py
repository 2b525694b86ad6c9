"""Profiling: a workload in, a Profile out; the model is left as it was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from profiler.measurement.assembly import Measured, RerunTimes, alike, assemble, by_label, typical_seconds
from profiler.measurement.link_bandwidth import measure_link
from profiler.measurement.meter import Interval, Meter, memory_meter, time_meter
from profiler.measurement.option_steps import MenuSteps
from profiler.measurement.stage_options import Propose, grouped, steps_for
from profiler.measurement.stage_probe import FirstRun, StepProbe
from profiler.op_graph import Choice, ChoiceError, StageOps
from profiler.recomputation.module_rerun import CallTraits, rerun_keeping, rerun_until_saved
from profiler.recomputation.recompute_checks import EscapedTensors
from profiler.records import Profile
from profiler.trace.compiled_trace import trace_compiled
from profiler.trace.partition import ChosenStage, StagePattern, StagesError, choose_stages, stages_of
from profiler.trace.stage_names import State
from profiler.trace.step_trace import trace_step
from profiler.workload.compiled_forwards import is_compiled, uncompiled
from profiler.workload.forward_patches import is_patched
from profiler.workload.snapshot import RandomState, preserved
from profiler.workload.steps import ProfileError, first_step, resident_bytes_of, until_stepped
from profiler.workload.tensor_trees import map_tensors, tensors_in
from profiler.workload.workload import Workload

Progress = Callable[[str, int, int], None]
PLAIN_STEPS = 3
DROPPING_FORWARDS = 2
_RUNS = 4 + PLAIN_STEPS + DROPPING_FORWARDS


def profile(
    workload: Workload,
    *,
    stages: Sequence[StagePattern] | None = None,
    propose: Propose | None = None,
    state: State | None = None,
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
        propose: names the choices inside a stage that are worth measuring; None for none.
        state: names those that a person asks for; they are measured and never left out.
        progress: called as ``progress(what, done, total)`` before each run.

    Returns:
        The profile: bytes as exact integers, seconds as medians.

    Raises:
        ProfileError: the step fails, or the model is in eval mode or planned.
        StagesError: a stage pattern matches nothing, or the step calls the model more than once.
        ChoiceError: what ``state`` asks for cannot be.
    """
    if not workload.model.training:
        raise ProfileError("profile: expected a model in training mode, got one in eval mode; call model.train()")
    if is_patched(workload.model):
        raise ProfileError(
            "profile: expected a model without a plan, got a planned one; call its handle's remove() first"
        )
    report = _Reporter(progress)
    with preserved(workload):
        randomness = RandomState.capture()
        report("warm up")
        first_step(workload)
        resident = resident_bytes_of(workload)
        try:
            measured = _measure(workload, stages, propose or _nothing, state, resident.total, randomness, report)
        except (StagesError, ChoiceError):
            raise
        except Exception as error:
            raise ProfileError(
                f"profile: expected a step that runs the same way several times and under saved-tensor hooks, got "
                f"{type(error).__name__}: {error}; leave what fails out of the workload"
            ) from error
        return replace(assemble(workload, measured, resident), link=measure_link(workload.device))


class _Reporter:
    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        self.runs = _RUNS

    def __call__(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what, self._done, max(self.runs, self._done + 1))
        self._done += 1


def _measure(
    workload: Workload,
    patterns: Sequence[StagePattern] | None,
    propose: Propose,
    state: State | None,
    resident_bytes: int,
    randomness: RandomState,
    report: _Reporter,
) -> Measured:
    device = workload.device
    report("trace")
    randomness.restore()
    compiled = is_compiled(workload.model)
    trace = uncompiled(trace_step)(workload) if compiled else trace_step(workload)
    if sum(call.parent < 0 for call in trace.calls) > 1:
        raise StagesError(
            "profile: expected a step that calls the model once, got several calls (by the loss?); "
            "put what calls it into one module and profile that"
        )
    stages = choose_stages(trace, patterns)
    seen, kinds = (trace, stages), alike(stages)
    if compiled:
        report("trace, compiled")
        randomness.restore()
        trace, calls = trace_compiled(workload, trace, [stage.call for stage in stages])
        stages = stages_of(trace, calls)
    traits = [_traits(stage) for stage in stages]
    with StepProbe(workload, stages) as probe:
        report("memory")
        memory = until_stepped(
            workload, lambda: _again(randomness, probe, memory_meter(device, resident_bytes), mark_saves=True)
        )
        deaths, output_deaths = probe.deaths, probe.output_deaths
        groups = grouped(*seen, kinds, by_label(memory), propose, state)
        report.runs += steps_for(groups)
        report("memory, nothing kept")
        randomness.restore()
        dropped, _, freed = probe.dropping_forward(memory_meter(device, resident_bytes), traits, hold_all=False)
        dropped_seconds, reruns = _time_dropping(workload, probe, stages, traits, randomness, report)
        steps = []
        for _ in range(PLAIN_STEPS):
            report("time")
            steps.append(until_stepped(workload, lambda: _again(randomness, probe, time_meter(device))))
        steps_of_menus = MenuSteps(probe, by_label(memory), device, resident_bytes, randomness, report)
        steps_of_menus.check(groups, propose)
        menus = steps_of_menus.measure(groups)
    return Measured(
        trace=trace,
        stages=stages,
        memory=by_label(memory),
        deaths=deaths,
        output_deaths=output_deaths,
        seconds=typical_seconds(steps),
        step_seconds=[sum(i.seconds for i in step) for step in steps],
        dropped_memory=by_label(dropped),
        dropped_seconds=dropped_seconds,
        freed=freed,
        reruns=reruns,
        menus=menus,
        menu_of={k: number for number, group in enumerate(groups) for k in group.members},
    )


def _again(randomness: RandomState, probe: StepProbe, meter: Meter, *, mark_saves: bool = False) -> list[Interval]:
    """A step with the random numbers of every other one."""
    randomness.restore()
    return probe.step(meter, mark_saves=mark_saves)


def _nothing(_: StageOps) -> list[Choice]:
    return []


def _time_dropping(
    workload: Workload,
    probe: StepProbe,
    stages: tuple[ChosenStage, ...],
    traits: list[CallTraits],
    randomness: RandomState,
    report: _Reporter,
) -> tuple[dict[str, float], list[RerunTimes]]:
    """Seconds of forwards without keeping, and of one rerun per distinct stage."""
    runs = []
    reruns: list[RerunTimes] = []
    for _ in range(DROPPING_FORWARDS):
        report("time, nothing kept")
        randomness.restore()
        intervals, first_runs, _ = probe.dropping_forward(time_meter(workload.device), traits, hold_all=True)
        runs.append(intervals)
        reruns = reruns or _reruns(first_runs, alike(stages), workload.device, is_compiled(workload.model))
    return typical_seconds(runs), reruns


def _reruns(first_runs: list[FirstRun], numbers: list[int], device: torch.device, compiled: bool) -> list[RerunTimes]:
    """Run one stage of each kind again; where one of a kind cannot be run twice, each of its kind is tried."""
    good: dict[int, RerunTimes] = {}
    doubtful: set[int] = set()
    found = []
    for first, number in zip(first_runs, numbers, strict=True):
        if first.input_changed():
            found.append(RerunTimes(failure="its input is changed in place afterwards"))
            continue
        if number in good and number not in doubtful:
            found.append(good[number])
            continue
        result = _rerun(first, device, compiled)
        if result.failure:
            doubtful.add(number)
        else:
            good[number] = result
        found.append(result)
    return found


def _rerun(first: FirstRun, device: torch.device, compiled: bool) -> RerunTimes:
    """Run a call again: does it give the same, and how long does it take?"""
    try:
        args, kwargs = _fresh(first.arguments)
        with EscapedTensors() as survivors:
            saved, output = rerun_keeping(first.call, first.state, args, kwargs)
        if compiled:  # Under the survivors' dispatch mode it ran uncompiled.
            args, kwargs = _fresh(first.arguments)
            saved, output = rerun_keeping(first.call, first.state, args, kwargs)
        failure = _difference(first, saved, output, device)
        del saved, output, args, kwargs
        if survivors.any_left():
            failure = failure or "it stores tensors of its forward (in an attribute, a cache or a hook)"
        times = []
        for _ in range(2):
            args, kwargs = _fresh(first.arguments)
            _synchronize(device)
            begin = time.perf_counter()
            rerun_until_saved(first.call, first.state, args, kwargs, len(first.saved))
            _synchronize(device)
            times.append(time.perf_counter() - begin)
    except Exception as error:  # noqa: BLE001 - user code runs here; whatever it raises, it cannot be run twice.
        return RerunTimes(failure=f"running it a second time fails: {error}")
    return RerunTimes(seconds=min(times), failure=failure)


def _fresh(arguments: Any) -> Any:
    """The same tensors in containers of their own, which the call may add to."""
    return map_tensors(lambda tensor: tensor, arguments)


def _difference(first: FirstRun, saved: list[Tensor], output: Any, device: torch.device) -> str:
    if [(tuple(t.shape), t.dtype) for t in saved] != first.saved:
        return (
            "running it a second time saves other tensors (a cache or a counter changed; for transformers: use_cache)"
        )
    for before, after in zip(tensors_in(first.output), tensors_in(output), strict=True):
        # GPU kernels may add in another order; a wrong mask or input differs by far more than this.
        tolerance = 0.0 if device.type == "cpu" else 0.05
        if not torch.allclose(before, after, rtol=tolerance, atol=tolerance, equal_nan=True):
            return "running it a second time gives another result"
    return ""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _traits(stage: ChosenStage) -> CallTraits:
    return CallTraits(draws_random=stage.call.draws_random, mutated_buffers=stage.call.mutated_buffers)
