"""The runs of a profile where a step that keeps everything does not fit: none takes more than a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiler.measurement.assembly import Measured
from profiler.measurement.captured_stages import KindCapture, ProposeRuns
from profiler.measurement.frugal_probe import FrugalProbe
from profiler.measurement.measuring import Measuring, ProgressReporter
from profiler.measurement.meter import MarkedPhases, Meter, NoMeter, PhasesOfMark, time_meter
from profiler.measurement.option_groups import OptionGroup
from profiler.measurement.program_steps import ProgramSteps
from profiler.measurement.stage_marks import PlainStep
from profiler.measurement.stage_probe import FirstRun, StageProbe
from profiler.measurement.stage_reruns import RerunTimes
from profiler.records import MenuRecord, ResidentBytes
from profiler.tensors.tensor_trees import tensors_in
from profiler.trace.partition import ChosenStage, Stages, alike, choose_stages
from profiler.trace.step_record import Trace
from profiler.trace.step_trace import StepRecorder, trace_forward
from profiler.workload.given_models import named_modules
from profiler.workload.snapshot import RandomState
from profiler.workload.steps import TensorsOfState, first_step, held_by_nodes
from profiler.workload.workload import OnPhase, Workload

_KEPT_BY_NODES = (
    "the graph keeps tensors beyond backward (a function's ctx.x = x, outputs or attributes without "
    "a part in the loss): in stages that ran again they were not seen; use ctx.save_for_backward, and detach() the rest"
)


def frugal_first_step(workload: Workload, patterns: Stages, limit_bytes: int) -> None:
    """As ``first_step``, with every stage run again in backward."""
    trace = trace_forward(workload)
    stages = choose_stages(trace, patterns)
    with FrugalProbe(workload, stages, trace, alike(stages), limit_bytes) as probe:
        probe.run_again()
        first_step(workload, lambda on_phase: probe.dropping_step(NoMeter(), on_phase))


class FrugalMeasuring(Measuring):
    """As ``Measuring``; a few stages are kept at a time, the others run again.

    Args:
        workload, resident, state, randomness, report: as for ``Measuring``.
        limit_bytes: the most that a step may take.
    """

    def __init__(
        self,
        workload: Workload,
        resident: ResidentBytes,
        state: TensorsOfState,
        randomness: RandomState,
        report: ProgressReporter,
        limit_bytes: int,
    ) -> None:
        super().__init__(workload, resident, state, randomness, report)
        self._limit_bytes = limit_bytes
        self._reruns: list[RerunTimes] = []
        self._nodes_keep = False

    def measure(self, patterns: Stages, programs: ProposeRuns | None = None, *, every_stage: bool = False) -> Measured:
        """As of a step that keeps everything."""
        measured = super().measure(patterns, programs, every_stage=every_stage)
        if not self._nodes_keep:
            return measured
        return replace(measured, unsteady=(*measured.unsteady, _KEPT_BY_NODES))

    def _traced(self) -> Trace:
        return trace_forward(self._workload)

    def _probe(self, trace: Trace, stages: Sequence[ChosenStage]) -> FrugalProbe:
        return FrugalProbe(self._workload, stages, trace, alike(stages), self._limit_bytes)

    def _saving_step(self, probe: StageProbe) -> PlainStep:
        assert isinstance(probe, FrugalProbe)
        self._begin("run stages again")
        self._reruns = probe.run_again()
        self._add_backward(probe)
        meters = self._from_the_same(self._memory_meter)
        step = self._step("memory, a few stages kept at a time", lambda: probe.saving_steps(meters))
        self._nodes_keep = bool(held_by_nodes(self._workload))
        return step

    def _timed_step(self, probe: StageProbe) -> MarkedPhases:
        assert isinstance(probe, FrugalProbe)
        meters = self._from_the_same(lambda: time_meter(self._device))
        return self._step("time, a few stages kept at a time", lambda: probe.timed_steps(meters))

    def _from_the_same(self, make_meter: Callable[[], Meter]) -> Callable[[], Meter]:
        def made() -> Meter:
            self._randomness.restore()
            return make_meter()

        return made

    def _add_backward(self, probe: FrugalProbe) -> None:
        """What only backward shows of the trace: its ops, and gradients that are sparse."""
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

    def _time_dropping(
        self,
        probe: StageProbe,
        stages: Sequence[ChosenStage],
        groups: Sequence[OptionGroup],
        known: Sequence[RerunTimes] | None,
    ) -> tuple[MarkedPhases, list[RerunTimes]]:
        assert isinstance(probe, FrugalProbe)
        self._begin("time, nothing kept")
        timed = probe.dropping_forward(time_meter(self._device), hold_all=False)
        if known is None:
            captures = self._begin_captures(stages, self._reruns)
            self._begin("capture")
            probe.dropping_forward(
                NoMeter(), hold_all=False, on_stage=lambda k, first: _capture(probe, captures, k, first)
            )
            self._finish_captures(groups, captures)
        return timed.phases, self._reruns

    def _measure_menus(
        self,
        probe: StageProbe,
        groups: Sequence[OptionGroup],
        memory: PhasesOfMark,
        programs: ProposeRuns | None,
        timed: Sequence[MarkedPhases],
    ) -> list[MenuRecord]:
        assert isinstance(probe, FrugalProbe)
        steps = ProgramSteps(probe, memory, self._memory_meter, self._randomness, self._report, timed)
        one_each = [replace(group, members=group.members[-1:]) for group in groups]
        return [menu for together in self._batches(probe, one_each) for menu in steps.measure(together, programs)]

    def _batches(self, probe: FrugalProbe, groups: Sequence[OptionGroup]) -> list[list[OptionGroup]]:
        """Groups that may be measured in the same steps, in order."""
        batches: list[list[OptionGroup]] = []
        for group in groups:
            if batches:
                members = [each.members[0] for each in (*batches[-1], group) if each.is_captured]
                if probe.needed_bytes(members) <= probe.limit_bytes:
                    batches[-1].append(group)
                    continue
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
