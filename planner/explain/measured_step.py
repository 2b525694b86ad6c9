"""Measured steps: their timelines without a plan and with it, and what is alive at the planned step's peak."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from planner.explain.peak import KEPT, LOOP, MADE_AGAIN, Peak, PeakPart
from planner.explain.timeline import PhaseName, Span, SpanKind, Timeline
from planner.plans.lowering import lower_schedule
from planner.plans.plan import Plan
from planner.runtime.applier import apply
from planner.runtime.plan_checks import check_device, check_inputs, check_precision
from planner.runtime.stage_places import split_name
from profiler.measurement.meter import Mark, MarkedPhases, Meter, step_memory_meter, time_meter
from profiler.measurement.planned_probe import LiveStorage, LiveTensorTracker, PeakSnapshot, PlannedProbe
from profiler.measurement.stage_probe import calls_outside
from profiler.workload.compiled_forwards import is_compiled, unwrapped
from profiler.workload.random_states import RandomState
from profiler.workload.snapshot import preserved
from profiler.workload.steps import first_step
from profiler.workload.workload import Workload

ROUNDS = 3  # timed steps each of the model without the plan and with it, in turns


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The measured timelines of both steps, and the explained peak of the planned step."""

    unplanned: Timeline
    planned: Timeline
    peak: Peak


def view_step(workload: Workload, plan: Plan, *, rounds: int = ROUNDS) -> MeasuredStep:
    """Run the workload's step without the plan and with it, and look at what is alive.

    The workload is left as it was found. Bytes are of one step under the
    memory meter, seconds of other steps, medians per action.

    Raises:
        PlanMismatch: the plan is for another model or another precision.
        ProfileError: the step fails.
        ValueError: the plan is for another device or another batch, the model
            is compiled, or the step does not run the same way twice.
    """
    check_device(workload, plan)
    _check_not_compiled(workload.model)
    check_precision(workload.model, plan.precision, workload.autocast)
    with preserved(workload):
        randomness = RandomState()
        with apply(workload.model, plan):
            check_inputs(workload, plan)
            first_step(workload)
        first_step(workload)
        return _Viewer(workload, plan, randomness).view(rounds)


def _check_not_compiled(model: nn.Module) -> None:
    """Compiled code has no moments between its stages and ops at which to look."""
    if unwrapped(model) is not model or is_compiled(model):
        raise ValueError(
            "looking at a step: expected a model that is not compiled, got a compiled one; "
            "look before torch.compile, or use planner.measure for its peak"
        )


class _Viewer:
    def __init__(self, workload: Workload, plan: Plan, randomness: RandomState) -> None:
        self._workload = workload
        self._plan = plan
        self._randomness = randomness
        self._places = Places(plan)

    def view(self, rounds: int) -> MeasuredStep:
        with PlannedProbe(self._workload, self._places.calls, self._places.again) as probe:
            bytes_of = {planned: self._run(probe, self._memory(), planned) for planned in (False, True)}
            seconds_of: dict[bool, list[MarkedPhases]] = {False: [], True: []}
            for planned in [False, True] * rounds:
                seconds_of[planned].append(self._run(probe, time_meter(self._workload.device), planned))
            with (
                LiveTensorTracker(self._workload, probe, self._memory()) as watch,
                apply(self._workload.model, self._plan),
            ):
                self._randomness.restore()
                peak = watch.step()
        unplanned, planned = (self._timeline(bytes_of[p], seconds_of[p], planned=p) for p in (False, True))
        return MeasuredStep(unplanned=unplanned, planned=planned, peak=self._places.peak(peak))

    def _memory(self) -> Meter:
        return step_memory_meter(self._workload)

    def _run(self, probe: PlannedProbe, meter: Meter, planned: bool) -> MarkedPhases:
        self._randomness.restore()
        with apply(self._workload.model, self._plan) if planned else contextlib.nullcontext():
            return probe.step(meter)

    def _timeline(self, metered: MarkedPhases, timed: list[MarkedPhases], *, planned: bool) -> Timeline:
        marks = [mark for mark, _ in metered]
        if any([mark for mark, _ in run] != marks for run in timed):
            raise ValueError(
                f"measuring {self._plan.model_class}: expected a step that goes through its stages in the same order "
                "every time, got another one; leave out what changes from step to step"
            )
        seconds = [statistics.median(run[k][1].seconds for run in timed) for k in range(len(marks))]
        spans = tuple(self._places.spans(metered, seconds))
        return Timeline(source="measured", planned=planned, spans=spans)


class Places:
    """The marks of a step in the words of a plan.

    Attributes:
        calls: of its stages: the module's name, and how many calls of it come before outside of stages.
        again: as ``PlannedProbe`` takes it.
    """

    def __init__(self, plan: Plan) -> None:
        modules = [k for k, stage in enumerate(plan.stages) if stage.kind == "stage"]
        place = {k: i for i, k in enumerate(modules)}
        stages = [plan.stages[k] for k in modules]
        self.calls = calls_outside((*split_name(stage.name), stage.record.inner_calls) for stage in stages)
        reruns = lower_schedule(plan.stages, plan.schedule).reruns
        self.again = {place[k]: [place[r.stage] for r in segments] for k, segments in reruns.items() if k in place}
        self._stages = [plan.stages[k].name for k in modules]
        self._outside = [self._outside_name(plan, modules, i) for i in range(len(modules) + 1)]

    def _outside_name(self, plan: Plan, modules: Sequence[int], i: int) -> str:
        """The part before the i-th stage; where the plan knows nothing there, it belongs to the stage before."""
        before = modules[i] - 1 if i < len(modules) else len(plan.stages) - 1
        return plan.stages[max(0, before)].name

    def stage(self, mark: Mark) -> str:
        """The stage, or the part outside of stages, that a mark names; empty for the optimizer."""
        if mark.place is None:
            return self._outside[-1] if mark.phase == "loss" else ""
        return (self._stages if mark.place.kind == "stage" else self._outside)[mark.place.index]

    def spans(self, phases: MarkedPhases, seconds: Sequence[float]) -> Iterator[Span]:
        """One span per stretch of the same action."""
        now = 0.0
        rows = [(mark, p, s) for (mark, p), s in zip(phases, seconds, strict=True) if mark.phase != "end"]
        for (phase, stage, action), group in itertools.groupby(rows, key=lambda row: self._what(row[0])):
            stretch = list(group)
            length = sum(spent for *_, spent in stretch)
            yield Span(
                phase=phase,
                stage=stage,
                action=action,
                start_seconds=now,
                end_seconds=now + length,
                before_bytes=stretch[0][1].start_bytes,
                peak_bytes=max(part.peak_bytes for _, part, _ in stretch),
                after_bytes=stretch[-1][1].end_bytes,
            )
            now += length

    def _what(self, mark: Mark) -> tuple[PhaseName, str, SpanKind]:
        phase, stage = _phase_of(mark), self.stage(mark)
        if phase == "optimizer":
            return phase, stage, "optimizer"
        return phase, stage, "recompute" if mark.phase == "again" else phase

    def peak(self, snapshot: PeakSnapshot) -> Peak:
        """The peak in the words of a plan; what no storage explains is a temporary of the op's kernel."""
        phase, stage, action = self._what(snapshot.mark)
        at = f"{snapshot.op} in {snapshot.module}" if snapshot.module else snapshot.op
        parts = [self._part(storage, snapshot) for storage in snapshot.storages]
        left = snapshot.peak_bytes - snapshot.explained_bytes
        temporary = PeakPart(what="temporaries of kernels", size_bytes=left, op=snapshot.op, stage=stage, phase=phase)
        return Peak(
            source="measured",
            peak_bytes=snapshot.peak_bytes,
            phase=phase,
            stage=stage,
            action=action,
            op=at,
            parts=tuple(part for part in (*parts, temporary) if part.size_bytes),
        )

    def _part(self, storage: LiveStorage, snapshot: PeakSnapshot) -> PeakPart:
        if storage.made_in is None:
            return PeakPart(
                what=_RESIDENT[storage.kind], size_bytes=storage.size_bytes, module=storage.module, tensors=1
            )
        stage = self.stage(storage.made_in)
        return PeakPart(
            what=_why_alive(storage, storage.made_in, snapshot),
            size_bytes=storage.size_bytes,
            op=storage.op,
            module=_inside(storage.module, stage),
            stage=stage,
            phase=_phase_of(storage.made_in),
            tensors=1,
        )


_RESIDENT: Mapping[str, str] = {
    "parameter": "parameters",
    "optimizer state": "optimizer states",
    "buffer": "buffers",
    "batch": "batch",
    "loop": LOOP,
    "gradient": "gradients from before",
}


def _why_alive(storage: LiveStorage, mark: Mark, snapshot: PeakSnapshot) -> str:
    if storage.kind == "gradient":
        return "gradients of parameters"
    made_in = _phase_of(mark)
    if made_in == "forward":
        return "made as its forward runs" if mark == snapshot.mark else KEPT
    if storage.again:
        return MADE_AGAIN
    return "made by the optimizer's step" if made_in == "optimizer" else "backward temporaries"


def _phase_of(mark: Mark) -> PhaseName:
    if mark.phase == "forward":
        return "forward"
    return "optimizer" if mark.phase in ("optimizer", "evaluation", "end") else "backward"


def _inside(module: str, stage: str) -> str:
    """A module's name relative to its stage; whole where it lies outside."""
    name, _ = split_name(stage)
    return module[len(name) :].removeprefix(".") if module == name or module.startswith(f"{name}.") else module
