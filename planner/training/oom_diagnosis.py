"""What happened when a step ran out of memory: what the error says, and the step run once more under a meter."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import nn

from planner.explain.measured_step import Places
from planner.explain.timeline import PhaseName, Span, Timeline, predicted_timelines
from planner.plans.plan import Plan
from planner.runtime.applier import apply, split_name
from planner.runtime.dropped_stage import DroppedStage
from planner.training.oom_report import ActionMemory, FailureReport, Stop, allocation_in
from profiler.measurement.device_memory import is_limited, ran_out
from profiler.measurement.meter import Mark, MarkedPhases, Meter, WarmUp, step_memory_meter
from profiler.measurement.planned_probe import PlannedProbe
from profiler.workload.compiled_forwards import is_compiled, unwrapped
from profiler.workload.snapshot import preserved
from profiler.workload.steps import causes_of
from profiler.workload.workload import Workload


def stop_of(error: BaseException, model: nn.Module, plan: Plan, *, step: int, phase: PhaseName | None) -> Stop:
    """What an error that ``ran_out`` says by itself; holds no tensor and no frame."""
    causes = list(_causes(error))
    stages = [stage for cause in causes for stage in _stages_in(cause.__traceback__, model, plan)]
    message = str(causes[-1]).strip() or type(causes[-1]).__name__
    return Stop(
        step=step,
        phase=phase,
        stage=stages[-1] if stages else "",
        message=message.splitlines()[0],
        allocation_bytes=allocation_in(message),
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, as far as these ran out of memory."""
    return itertools.takewhile(ran_out, causes_of(error))


def _stages_in(traceback: TracebackType | None, model: nn.Module, plan: Plan) -> Iterator[str]:
    """The stages whose code a traceback goes through: in forward by their modules, in backward where they run again."""
    names = {id(module): name for name, module in unwrapped(model).named_modules()}
    planned = plan.stages
    stages = {split_name(stage.name)[0]: stage.name for stage in reversed(planned) if stage.kind == "stage"}
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, DroppedStage):
            yield owner.stage.name
        elif id(owner) in names and names[id(owner)] in stages:
            yield stages[names[id(owner)]]
        traceback = traceback.tb_next


def report_of(workload: Workload, plan: Plan, stop: Stop, *, restored: bool) -> FailureReport:
    """The report of a failure; runs the step once more, and leaves the workload as it is.

    Args:
        workload: without a plan, and with the failed step's tensors gone.
        plan: that the step ran under.
        stop: what the error said.
        restored: whether the failed step was undone.
    """
    spans, repeated = _run_again(workload, plan)
    timeline = _beside(spans, _predicted(plan))
    last = timeline[-1] if timeline and repeated else None
    phase, stage = (last.phase, last.stage) if last else (stop.phase, stop.stage)
    here = last or next((row for row in timeline if (row.phase, row.stage) == (phase, stage)), None)
    return FailureReport(
        step=stop.step,
        phase=phase,
        stage=stage,
        predicted_bytes=here.predicted_bytes if here else _predicted_at(plan, phase, stage),
        actual_bytes=here.actual_bytes if here else None,
        allocation_bytes=stop.allocation_bytes,
        message=stop.message,
        timeline=timeline,
        repeated=repeated,
        restored=restored,
        budget_bytes=plan.budget_bytes,
        headroom_bytes=plan.headroom_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
    )


# Set aside while a step runs that is to run out of memory: the profiler takes some itself as it stops.
_SPARE_BYTES = 2**23


class _Keeping:
    """A meter that keeps what it found, also where the step fails."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._spare = torch.empty(_SPARE_BYTES, dtype=torch.uint8) if is_limited() else None
        self.phases: MarkedPhases = []

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        self._meter.start(mark, warm_up)

    def mark(self, mark: Mark) -> None:
        self._meter.mark(mark)

    def stop(self) -> MarkedPhases:
        self._spare = None
        self.phases = self._meter.stop()
        return self.phases


def _run_again(workload: Workload, plan: Plan) -> tuple[list[Span], bool]:
    """The actions of one more step, and whether it ran out of memory, too; none of a compiled model's.

    Where it does not, another one runs: that has the output of the one before beside it.
    """
    if unwrapped(workload.model) is not workload.model or is_compiled(workload.model):
        return [], False
    places = Places(plan)
    meter, repeated = None, False
    try:
        with (
            preserved(workload),
            PlannedProbe(workload, places.calls, places.again) as probe,
            apply(workload.model, plan),
        ):
            for _ in range(2):
                meter = _Keeping(step_memory_meter(workload))
                probe.step(meter)
    except (RuntimeError, MemoryError) as error:
        repeated = ran_out(error)
        if not repeated:
            raise
    phases = meter.phases if meter else []
    return list(places.spans(phases, [0.0] * len(phases))), repeated and bool(phases)


def _predicted(plan: Plan) -> Timeline | None:
    if plan.chain is None:
        return None
    return predicted_timelines(plan.chain, plan.schedule, link=plan.link)[1]


def _predicted_at(plan: Plan, phase: PhaseName | None, stage: str) -> int | None:
    timeline = _predicted(plan)
    sizes = [] if timeline is None else [s.peak_bytes for s in timeline.spans if (s.phase, s.stage) == (phase, stage)]
    return max(sizes, default=None)


def _beside(spans: list[Span], predicted: Timeline | None) -> tuple[ActionMemory, ...]:
    """Each action with the bytes that the plan predicts for its n-th time, where it has it."""
    known: dict[tuple[object, ...], int] = {}
    for key, span in _numbered(list(predicted.spans) if predicted else []):
        known[key] = span.peak_bytes
    return tuple(
        ActionMemory(
            phase=span.phase,
            stage=span.stage,
            action=span.action,
            predicted_bytes=known.get(key),
            actual_bytes=span.peak_bytes,
        )
        for key, span in _numbered(spans)
    )


def _numbered(spans: list[Span]) -> Iterator[tuple[tuple[object, ...], Span]]:
    """The spans with what they are, and how many of the same come before; stretches of one action are one."""
    seen: Counter[tuple[object, ...]] = Counter()
    for what, group in itertools.groupby(spans, key=lambda span: (span.phase, span.stage, span.action)):
        stretch = list(group)
        yield (*what, seen[what]), max(stretch, key=lambda span: span.peak_bytes)
        seen[what] += 1
