"""The runs of one profile: the traced step, those under the memory meter, the timed ones, and those of programs.

Where a step that keeps everything does not fit, a few stages are kept at a time, and no step takes more than a limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from profiler.agreement import agreed, any_rank, gathered, largest
from profiler.measurement.assembly import Measured
from profiler.measurement.captured_stages import KindCapture, ProposeRuns
from profiler.measurement.frugal_probe import FrugalProbe
from profiler.measurement.meter import (
    Mark,
    MarkedPhases,
    Meter,
    NoMeter,
    PhasesOfMark,
    ShardedMemoryMeter,
    by_mark,
    memory_meter,
    time_meter,
    typical_seconds,
)
from profiler.measurement.program_steps import OptionGroup, ProgramSteps, families_worth_capturing, grouped, steps_for
from profiler.measurement.stage_probe import DroppingForward, FirstRun, MakeMeter, StageProbe
from profiler.measurement.stage_reruns import HELD, RerunTimes, kept_by_hooks, rerun_stages
from profiler.measurement.unsteady_bytes import left_in_cycles, what_follows_the_batch, what_is_unsteady
from profiler.messages import told_by
from profiler.records import MenuRecord, Phase, ResidentBytes
from profiler.trace.divisible import heads_of
from profiler.trace.partition import (
    ChosenStage,
    Stages,
    StagesError,
    alike,
    choose_stages,
    left_out_of,
    names_unseen,
    stages_of,
)
from profiler.trace.step_record import Trace
from profiler.trace.step_trace import StepRecorder, trace_compiled, trace_forward, trace_step
from profiler.workload.compiled_forwards import is_compiled, uncompiled
from profiler.workload.data_parallel import states_in
from profiler.workload.given_models import inner_model, named_modules
from profiler.workload.optimizers import with_inner
from profiler.workload.random_states import RandomState
from profiler.workload.steps import (
    ProfileError,
    Result,
    TensorsOfState,
    count_many_steps,
    counts_steps,
    first_step,
    held_by_nodes,
    until_stepped,
)
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import OnPhase, Workload

Progress = Callable[[str, int, int], None]
TURNS = 3  # of a plain step and a forward without keeping
_RUNS = 5 + 2 * TURNS
SEVERAL_CALLS = (
    "profile: the step calls the model several times before one backward (by the loss?); put these calls into one "
    "module, and train that"
)


class ProgressReporter:
    """Tells what runs next, and how many runs there are: to ``progress``, or to the log."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress or told_by("profiler", "profiling")
        self._done = 0
        self.runs = _RUNS

    def __call__(self, what: str) -> None:
        self._progress(what, self._done, max(self.runs, self._done + 1))
        self._done += 1


class Measuring:
    """The runs of one profile, each from the same random numbers.

    Args:
        workload: the training step.
        resident: the bytes between two steps.
        state: the tensors that a step may replace.
        randomness: the random states that every run begins from.
        report: called with the name of each run.
        limit_bytes: the most that a step may take: a few stages are kept at a time, and the others are recomputed.
            None where plain steps keep everything.
    """

    def __init__(
        self,
        workload: Workload,
        resident: ResidentBytes,
        state: TensorsOfState,
        randomness: RandomState,
        report: ProgressReporter,
        limit_bytes: int | None,
    ) -> None:
        self._workload, self._limit_bytes = workload, limit_bytes
        self._device = workload.device
        self._compiled = is_compiled(workload.model)
        self._resident, self._state = resident, state
        self._randomness = randomness
        self._report = report
        self._late_phases: list[Phase] = []
        self._traced_step: Trace | None = None
        self._wanted: dict[int, list[int]] = {}  # by family, the stages to capture
        self._gradient_strides: dict[int, list[tuple[int, ...]]] = {}

    def measure(self, patterns: Stages, programs: ProposeRuns | None = None, *, every_stage: bool = False) -> Measured:
        """Runs everything that a profile is made of.

        Args:
            patterns: the ``stages`` of ``profile``.
            programs: names the orders worth having of a captured stage's ops; None to capture nothing.
            every_stage: capture those, too, that save little.
        """
        uncompiled_trace, uncompiled_stages = trace, stages = self._trace(patterns)
        left_out = left_out_of(trace, stages) if patterns is None else ()
        if self._compiled:
            self._begin("trace, compiled")
            trace, calls = trace_compiled(self._workload, trace, [stage.call for stage in stages])
            stages = stages_of(trace, calls)
        with self._probe(trace, stages) as probe:
            recomputed = self._before_saving(probe) if isinstance(probe, FrugalProbe) else []
            saving = self._step("memory", lambda: probe.saving_step(self._from_the_same(self._memory_meter)))
            nodes_keep = self._limit_bytes is not None and bool(held_by_nodes(self._workload))
            self._gradient_strides = saving.gradient_strides
            memory = by_mark(saving.phases)
            # They depend on seconds and bytes, and say which steps are to come.
            groups = agreed(grouped(uncompiled_trace, uncompiled_stages, self._kinds(uncompiled_stages), memory))
            self._wanted = {} if programs is None else families_worth_capturing(groups, every=every_stage)
            self._begin("memory, nothing kept")
            dropping = probe.dropping_forward(self._memory_meter(), hold_all=False)
            steps, dropped_seconds, reruns = self._time_in_turns(probe, stages, groups, recomputed)
            self._report.runs += steps_for(groups)
            menus = self._measure_menus(probe, groups, memory, programs, steps)
            if late := self._late_update(probe):
                memory[Mark("optimizer")] = [*memory[Mark("optimizer")], *late]
            varied = list(dict.fromkeys([*saving.varied, *dropping.varied]))
            if not varied and len(probe.nodes_of_steps) > 1:
                varied = [""]
            kept_twice = set().union(*gathered(kept_by_hooks(trace, stages, saving.held & dropping.hidden)))
        return Measured(
            trace=trace,
            stages=stages,
            plain=saving,
            memory=memory,
            seconds=typical_seconds(steps),
            step_seconds=[sum(phase.seconds for _, phase in step) for step in steps],
            dropped_memory=by_mark(dropping.phases),
            dropped_seconds=dropped_seconds,
            freed=dropping.freed,
            unseen=names_unseen(self._workload.model, uncompiled_trace, uncompiled_stages),
            reruns=[replace(rerun, failure=HELD) if k in kept_twice else rerun for k, rerun in enumerate(reruns)],
            menus=[
                MenuRecord(ops=menu.ops, opaque=HELD) if kept_twice.intersection(group.members) else menu
                for menu, group in zip(menus, groups, strict=True)
            ],
            menu_of={k: number for number, group in enumerate(groups) for k in group.members},
            unsteady=(
                *what_is_unsteady(self._workload, uncompiled_trace, uncompiled_stages, self._resident, varied),
                *([_KEPT_BY_NODES] if nodes_keep else []),
                *left_in_cycles(saving),
            ),
            batch_sized=what_follows_the_batch(self._workload, uncompiled_trace, uncompiled_stages),
            left_out=left_out,
            heads=() if self._compiled else heads_of(trace, self._device),
        )

    def _kinds(self, stages: Sequence[ChosenStage]) -> list[int]:
        """A number for each stage; equal where structure, shapes and the layouts of gradients are equal."""
        numbers: dict[object, int] = {}
        strides = [tuple(self._gradient_strides.get(k, ())) for k in range(len(stages))]
        return [numbers.setdefault(kind, len(numbers)) for kind in zip(alike(stages), strides, strict=True)]

    def _probe(self, trace: Trace, stages: Sequence[ChosenStage]) -> StageProbe:
        if self._limit_bytes is None:
            return StageProbe(self._workload, stages)
        return FrugalProbe(self._workload, stages, trace, alike(stages), self._limit_bytes)

    def _before_saving(self, probe: FrugalProbe) -> list[RerunTimes]:
        """Recomputes each stage once, which tells the steps that follow which stages they have to keep."""
        self._begin("recompute stages")
        recomputed = probe.run_again()
        self._add_backward(probe)
        return recomputed

    def _add_backward(self, probe: FrugalProbe) -> None:
        """Adds to the trace of a forward what only a backward shows: its ops, and gradients that are sparse."""
        self._begin("trace, backward")
        recorder = StepRecorder(self._workload)

        def run(on_phase: OnPhase) -> Any:
            on_phase("forward", None)
            return probe.dropping_step(NoMeter(), on_phase)

        found = recorder.record_step(named_modules(self._workload.model), recorder, run)
        calls = {(id(call.module), call.index): call for call in found.calls}
        for op in found.backward_ops:
            # Nodes have other numbers in every step.
            op.node = next(
                (
                    stage.call.first_node
                    for stage in probe.stages
                    if (call := calls.get((id(stage.call.module), stage.call.index))) is not None
                    and call.first_node <= op.node < call.end_node
                ),
                -1,
            )
        probe.trace.backward_ops, probe.trace.sparse_gradients = found.backward_ops, found.sparse_gradients

    def _timed_step(self, probe: StageProbe) -> MarkedPhases:
        return self._step("time", lambda: probe.timed_step(self._from_the_same(lambda: time_meter(self._device))))

    def _from_the_same(self, make_meter: MakeMeter) -> MakeMeter:
        """Meters for steps that begin from the same random numbers."""

        def made() -> Meter:
            self._randomness.restore()
            return make_meter()

        return made

    def _late_update(self, probe: StageProbe) -> list[Phase]:
        """The optimizers' part of a step late in training: some do more from a certain number of steps on."""
        if not any(map(counts_steps, with_inner(self._workload.optimizers))):
            return []
        if self._late_phases:  # Programs were measured in such a step.
            return self._late_phases
        with self._late_in_training():
            step = self._step("memory, late in training", lambda: probe.step(self._memory_meter()))
        return by_mark(step)[Mark("optimizer")]

    @contextmanager
    def _late_in_training(self) -> Iterator[None]:
        # Of all that step: one that stands around another may take no hooks of its own.
        hook = register_optimizer_step_pre_hook(lambda stepping, *_: count_many_steps(stepping))
        try:
            yield
        finally:
            hook.remove()

    def _begin(self, what: str) -> None:
        self._report(what)
        self._randomness.restore()

    def _memory_meter(self) -> Meter:
        meter = memory_meter(self._device, self._resident.total, self._state)
        units = states_in(self._workload.model)
        return ShardedMemoryMeter(meter, units) if units else meter

    def _step(self, what: str, run: Callable[[], Result]) -> Result:
        """Run a whole step, again where the scaler leaves the optimizer out."""

        def run_with_the_same_numbers() -> Result:
            self._randomness.restore()
            return run()

        self._report(what)
        return until_stepped(self._workload, run_with_the_same_numbers)

    def _trace(self, patterns: Stages) -> tuple[Trace, tuple[ChosenStage, ...]]:
        self._begin("trace")
        if self._limit_bytes is not None:
            trace = trace_forward(self._workload)
        else:
            trace = uncompiled(trace_step)(self._workload) if self._compiled else trace_step(self._workload)
        if sum(call.parent < 0 for call in trace.calls) > 1:
            raise StagesError(SEVERAL_CALLS)
        stages = choose_stages(trace, patterns)
        largest([stage.name for stage in stages])  # They have to be the same.
        self._traced_step = trace
        return trace, stages

    def _time_in_turns(
        self,
        probe: StageProbe,
        stages: Sequence[ChosenStage],
        groups: Sequence[OptionGroup],
        recomputed: list[RerunTimes],
    ) -> tuple[list[MarkedPhases], dict[Mark, float], list[RerunTimes]]:
        """Times plain steps, forwards that keep nothing, and recomputed stages; captures the stages of the groups.

        Args:
            probe, stages, groups: the probe, stages and groups of the step.
            recomputed: the recomputations of the stages where there is a limit: they are not repeated in each turn.

        Returns:
            The plain steps; seconds of the forwards; and recomputations, both at the pace of a typical plain step: each
            is compared with the plain step of its turn, since a machine may be slower for a while. Every second turn
            begins with the forward: what a model does in every second call only shows in two steps on end.
        """
        steps: list[MarkedPhases] = []
        forwards: list[MarkedPhases] = []
        reruns: list[list[RerunTimes]] = []
        for turn in range(TURNS):
            if turn % 2 == 0:
                steps.append(self._timed_step(probe))
            self._begin("time, nothing kept")
            timed = probe.dropping_forward(time_meter(self._device), hold_all=self._limit_bytes is None)
            forwards.append(timed.phases)
            if isinstance(probe, FrugalProbe):
                reruns.append(recomputed)
                if turn == 0:
                    self._capture_passing(probe, stages, groups, recomputed)
            else:
                reruns.append(self._recompute(timed, stages, reruns[0] if reruns else None))
                if turn == 0 and not self._compiled:
                    self._capture_held(timed, stages, groups, reruns[0])
            if turn % 2 == 1:
                steps.append(self._timed_step(probe))
        totals = [sum(phase.seconds for _, phase in step) for step in steps]
        paces = [total / statistics.median_low(totals) if min(totals) > 0 else 1.0 for total in totals]
        at_one_pace = [
            [(mark, replace(phase, seconds=phase.seconds / pace)) for mark, phase in forward]
            for forward, pace in zip(forwards, paces, strict=True)
        ]
        typical = [
            replace(
                each[0],
                seconds=statistics.median(one.seconds / pace for one, pace in zip(each, paces, strict=True)),
                gather_seconds=statistics.median(one.gather_seconds for one in each),
            )
            for each in zip(*reruns, strict=True)
        ]
        return steps, typical_seconds(at_one_pace), typical

    def _recompute(
        self, timed: DroppingForward, stages: Sequence[ChosenStage], known: Sequence[RerunTimes] | None
    ) -> list[RerunTimes]:
        """Recomputes one call of each distinct stage of a forward that held all; ``known``: as in ``rerun_stages``."""
        if any_rank(len(timed.first_runs) != len(stages)):
            raise ProfileError(
                f"profile: the step ran {len(timed.first_runs)} of its {len(stages)} stages in another call (a counter "
                "or a batch chose others); let the profiled step always go the way that needs most memory"
            )
        return rerun_stages(timed.first_runs, alike(stages), self._device, compiled=self._compiled, known=known)

    def _capture_held(
        self,
        timed: DroppingForward,
        stages: Sequence[ChosenStage],
        groups: Sequence[OptionGroup],
        reruns: Sequence[RerunTimes],
    ) -> None:
        captures = self._begin_captures(stages, reruns)
        for k, capture in captures.items():
            capture.add(k, timed.first_runs[k])
        self._finish_captures(groups, captures)

    def _capture_passing(
        self,
        probe: FrugalProbe,
        stages: Sequence[ChosenStage],
        groups: Sequence[OptionGroup],
        reruns: Sequence[RerunTimes],
    ) -> None:
        """Captures each stage as it ends in a forward of its own, so that no two are held at once."""
        captures = self._begin_captures(stages, reruns)
        self._begin("capture")
        probe.dropping_forward(NoMeter(), hold_all=False, on_stage=lambda k, first: _capture(probe, captures, k, first))
        self._finish_captures(groups, captures)

    def _begin_captures(self, stages: Sequence[ChosenStage], reruns: Sequence[RerunTimes]) -> dict[int, KindCapture]:
        """Returns the object that captures each wanted stage; one for the stages of a family."""
        captures: dict[int, KindCapture] = {}
        for members in self._wanted.values():
            if not any(reruns[k].failure for k in members):
                captures |= dict.fromkeys(members, self._capture_of(stages))
        return dict(sorted(captures.items()))

    def _capture_of(self, stages: Sequence[ChosenStage]) -> KindCapture:
        assert self._traced_step is not None
        model = inner_model(self._workload.model)
        return KindCapture(stages, self._traced_step, model, self._device, self._gradient_strides)

    def _finish_captures(self, groups: Sequence[OptionGroup], captures: Mapping[int, KindCapture]) -> None:
        kinds = {family: captures[of[0]].finished() for family, of in self._wanted.items() if of[0] in captures}
        for group in groups:
            group.captured = kinds.get(group.family)

    def _measure_menus(
        self,
        probe: StageProbe,
        groups: Sequence[OptionGroup],
        memory: PhasesOfMark,
        programs: ProposeRuns | None,
        timed: Sequence[MarkedPhases],
    ) -> list[MenuRecord]:
        steps = ProgramSteps(probe, memory, self._memory_meter, self._randomness, self._report, timed)
        if isinstance(probe, FrugalProbe):
            one_each = [replace(group, members=group.members[-1:]) for group in groups]
            return [menu for together in _batches(probe, one_each) for menu in steps.measure(together, programs)]
        menus = steps.measure(groups, programs, self._late_in_training)
        self._late_phases = [] if any_rank(not self._workload.stepped) else steps.late_phases
        return menus


_KEPT_BY_NODES = (
    "the graph keeps tensors beyond backward (a function's ctx.x = x, outputs or attributes without "
    "a part in the loss), which recomputed stages do not show; use ctx.save_for_backward, and detach() the rest"
)


def frugal_first_step(workload: Workload, patterns: Stages, limit_bytes: int) -> None:
    """Runs ``first_step`` with every stage recomputed in backward."""
    trace = trace_forward(workload)
    stages = choose_stages(trace, patterns)
    with FrugalProbe(workload, stages, trace, alike(stages), limit_bytes) as probe:
        probe.run_again()
        first_step(workload, lambda on_phase: probe.dropping_step(NoMeter(), on_phase))


def _batches(probe: FrugalProbe, groups: Sequence[OptionGroup]) -> list[list[OptionGroup]]:
    """Returns the groups that may be measured in the same steps, in order."""
    batches: list[list[OptionGroup]] = []
    for group in groups:
        members = [each.members[0] for each in (*(batches[-1] if batches else ()), group) if each.is_captured]
        if batches and probe.needed_bytes(members) <= probe.limit_bytes:
            batches[-1].append(group)
        else:
            batches.append([group])
    return batches


def _capture(probe: FrugalProbe, captures: Mapping[int, KindCapture], k: int, first: FirstRun) -> None:
    """Capture a stage that has just run, where there is room to check a program of it."""
    capture = captures.get(k)
    if capture is None:
        return
    # What the call returns and the gradients of what goes into it, of both the stage and the program.
    module = probe.stages[k].call.module
    compared_bytes = 2 * sum(t.nbytes for t in (*tensors_in((first.output, first.arguments)), *module.parameters()))
    needed_bytes = probe.needed_bytes([k]) + compared_bytes
    if needed_bytes > probe.limit_bytes:
        capture.refuse(f"to check a program of it takes {needed_bytes:,} bytes, and the limit is {probe.limit_bytes:,}")
    capture.add(k, first)
