"""Profiles a workload's training step by running it about ten times; the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from profiler.measurement.alike_stages import alike
from profiler.measurement.assembly import Measured, assemble
from profiler.measurement.joined_phases import PhasesOfMark, by_mark, typical_seconds
from profiler.measurement.largest_step import DrawnStep, largest_steps
from profiler.measurement.link_bandwidth import measure_link
from profiler.measurement.meter import Mark, MarkedPhases, Meter, memory_meter, time_meter
from profiler.measurement.option_steps import OptionSteps
from profiler.measurement.stage_options import OptionGroup, ProposeChoices, grouped, steps_for, take_turns
from profiler.measurement.stage_probe import StageProbe
from profiler.measurement.stage_reruns import HELD, STORES, RerunTimes, kept_by_hooks, rerun_stages
from profiler.measurement.unsteady_bytes import what_is_unsteady
from profiler.op_graph import ChoiceError
from profiler.records import MenuRecord, Phase, Profile, ResidentBytes
from profiler.trace.compiled_trace import trace_compiled
from profiler.trace.left_out import left_out_of
from profiler.trace.partition import ChosenStage, StagePattern, StagesError, choose_stages, stages_of
from profiler.trace.stage_names import StateChoices, names_unseen
from profiler.trace.step_record import Trace
from profiler.trace.step_trace import trace_step
from profiler.workload.compiled_forwards import is_compiled, uncompiled
from profiler.workload.forward_patches import is_patched
from profiler.workload.snapshot import RandomState, preserved
from profiler.workload.steps import (
    ProfileError,
    Result,
    TensorsOfState,
    count_many_steps,
    counts_steps,
    first_step,
    resident_bytes_of,
    until_stepped,
)
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload

Progress = Callable[[str, int, int], None]
PLAIN_STEPS = 3
DROPPING_FORWARDS = 2
_RUNS = 5 + PLAIN_STEPS + DROPPING_FORWARDS


def profile(
    workload: Workload,
    *,
    stages: Sequence[StagePattern] | None = None,
    propose: ProposeChoices | None = None,
    state: StateChoices | None = None,
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
    if any(tensor.is_nested and tensor.layout is torch.strided for tensor in tensors_in(workload.inputs)):
        raise ProfileError(
            "profile: expected inputs that stages can take again, got a nested tensor of torch's older kind; make it "
            "with torch.nested.nested_tensor(..., layout=torch.jagged)"
        )
    report = _ProgressReporter(progress)
    with preserved(workload):
        randomness, state_of_modules = RandomState.capture(), TensorsOfState(workload)
        report("warm up")
        first_step(workload)
        try:
            largest = _warmed_up_for_the_largest(workload, randomness, report)
            resident = resident_bytes_of(workload)
            measuring = _Measuring(workload, resident, state_of_modules, largest.randomness, report)
            with largest.drawn():
                measured = measuring.measure(stages, propose or (lambda ops: ()), state)
        except (StagesError, ChoiceError):
            raise
        except Exception as error:
            raise ProfileError(
                f"profile: expected a step that runs the same way several times and under saved-tensor hooks, got "
                f"{type(error).__name__}: {error}; leave what fails out of the workload"
            ) from error
        profile = assemble(workload, measured, resident)
        # A step that runs forward several times would send as often as that over the link.
        return replace(profile, link=measure_link(workload.device) if profile.evaluations == 1 else None)


def _warmed_up_for_the_largest(workload: Workload, randomness: RandomState, report: _ProgressReporter) -> DrawnStep:
    """The largest step that the workload may draw; all that any step runs has been run, with its optimizer's states."""
    report("look for what is drawn at random")
    steps = largest_steps(workload, randomness)
    if len(steps) == 1 and steps[0].randomness is randomness and not steps[0].instead:
        return steps[0]
    for step in steps:
        report("warm up, as drawn")
        step.randomness.restore()
        with step.drawn():
            first_step(workload)
    return steps[-1]


class _ProgressReporter:
    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        self.runs = _RUNS

    def __call__(self, what: str) -> None:
        if self._progress is not None:
            self._progress(what, self._done, max(self.runs, self._done + 1))
        self._done += 1


class _Measuring:
    """The runs of one profile, each from the same random numbers."""

    def __init__(
        self,
        workload: Workload,
        resident: ResidentBytes,
        state: TensorsOfState,
        randomness: RandomState,
        report: _ProgressReporter,
    ) -> None:
        self._workload = workload
        self._device = workload.device
        self._compiled = is_compiled(workload.model)
        self._resident, self._state = resident, state
        self._randomness = randomness
        self._report = report

    def measure(
        self, patterns: Sequence[StagePattern] | None, propose: ProposeChoices, state: StateChoices | None
    ) -> Measured:
        """Everything that a profile is made of."""
        uncompiled_trace, uncompiled_stages = trace, stages = self._trace(patterns)
        left_out = left_out_of(trace, stages, self._workload.model) if patterns is None else ()
        if self._compiled:
            self._begin("trace, compiled")
            trace, calls = trace_compiled(self._workload, trace, [stage.call for stage in stages])
            stages = stages_of(trace, calls)
        with StageProbe(self._workload, stages) as probe:
            saving = self._step("memory", lambda: probe.saving_step(self._memory_meter()))
            memory = by_mark(saving.phases)
            groups = grouped(uncompiled_trace, uncompiled_stages, alike(uncompiled_stages), memory, propose, state)
            self._begin("memory, nothing kept")
            dropping = probe.dropping_forward(self._memory_meter(), hold_all=False)
            dropped_seconds, reruns = self._time_dropping(probe, stages)
            take_turns(groups, stages, [k for k, rerun in enumerate(reruns) if rerun.failure == STORES])
            self._report.runs += steps_for(groups)
            steps = [self._step("time", lambda: probe.step(time_meter(self._device))) for _ in range(PLAIN_STEPS)]
            menus = self._measure_menus(probe, groups, memory, propose)
            if late := self._late_update(probe):
                memory[Mark("optimizer")] = [*memory[Mark("optimizer")], *late]
            varied = list(dict.fromkeys([*saving.varied, *dropping.varied]))
            if not varied and len(probe.nodes_of_steps) > 1:
                varied = [""]
            kept_twice = kept_by_hooks(trace, stages, saving.held & dropping.hidden)
        return Measured(
            trace=trace,
            stages=stages,
            memory=memory,
            input_deaths=saving.input_deaths,
            output_deaths=saving.output_deaths,
            late_releases=saving.late_releases,
            seconds=typical_seconds(steps),
            step_seconds=[sum(phase.seconds for _, phase in step) for step in steps],
            dropped_memory=by_mark(dropping.phases),
            dropped_seconds=dropped_seconds,
            freed=dropping.freed,
            unseen=names_unseen(self._workload.model, uncompiled_trace, uncompiled_stages),
            reruns=[replace(rerun, failure=HELD) if k in kept_twice else rerun for k, rerun in enumerate(reruns)],
            menus=[
                replace(menu, options=(), reason=HELD) if kept_twice.intersection(group.members) else menu
                for menu, group in zip(menus, groups, strict=True)
            ],
            menu_of={k: number for number, group in enumerate(groups) for k in group.members},
            unsteady=what_is_unsteady(
                self._workload, uncompiled_trace, uncompiled_stages, self._resident.optimizer, varied
            ),
            left_out=left_out,
        )

    def _late_update(self, probe: StageProbe) -> list[Phase]:
        """The optimizers' part of a step late in training: some do more from a certain number of steps on."""
        counting = [optimizer for optimizer in self._workload.optimizers if counts_steps(optimizer)]
        if not counting:
            return []
        hooks = [each.register_step_pre_hook(lambda aged, *_: count_many_steps(aged)) for each in counting]
        try:
            step = self._step("memory, late in training", lambda: probe.step(self._memory_meter()))
        finally:
            for hook in hooks:
                hook.remove()
        return by_mark(step)[Mark("optimizer")]

    def _begin(self, what: str) -> None:
        self._report(what)
        self._randomness.restore()

    def _memory_meter(self) -> Meter:
        return memory_meter(self._device, self._resident.total, self._state)

    def _step(self, what: str, run: Callable[[], Result]) -> Result:
        """Run a whole step, again where the scaler leaves the optimizer out."""

        def run_with_the_same_numbers() -> Result:
            self._randomness.restore()
            return run()

        self._report(what)
        return until_stepped(self._workload, run_with_the_same_numbers)

    def _trace(self, patterns: Sequence[StagePattern] | None) -> tuple[Trace, tuple[ChosenStage, ...]]:
        self._begin("trace")
        trace = uncompiled(trace_step)(self._workload) if self._compiled else trace_step(self._workload)
        if sum(call.parent < 0 for call in trace.calls) > 1:
            raise StagesError(
                "profile: expected a step that calls the model once, got several calls (by the loss?); "
                "put what calls it into one module and profile that"
            )
        return trace, choose_stages(trace, patterns)

    def _time_dropping(
        self, probe: StageProbe, stages: Sequence[ChosenStage]
    ) -> tuple[dict[Mark, float], list[RerunTimes]]:
        """Seconds of forwards without keeping, and of one rerun per distinct stage."""
        runs: list[MarkedPhases] = []
        reruns: list[RerunTimes] = []
        for _ in range(DROPPING_FORWARDS):
            self._begin("time, nothing kept")
            timed = probe.dropping_forward(time_meter(self._device), hold_all=True)
            runs.append(timed.phases)
            reruns = reruns or rerun_stages(timed.first_runs, alike(stages), self._device, compiled=self._compiled)
        return typical_seconds(runs), reruns

    def _measure_menus(
        self, probe: StageProbe, groups: Sequence[OptionGroup], memory: PhasesOfMark, propose: ProposeChoices
    ) -> list[MenuRecord]:
        steps = OptionSteps(probe, memory, self._memory_meter, self._randomness, self._report)
        steps.check(groups, propose)
        return steps.measure(groups)
