"""A step that ran out of memory: where and why, the workload put back to before it, and the plan to try next."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType

import torch
from torch import Tensor, nn

from planner.explain.measured_step import Places
from planner.explain.timeline import PhaseName, Span, Timeline, predicted_timelines
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.plans.solving import SEARCH_SECONDS, replan
from planner.runtime.applier import apply, split_name
from planner.runtime.dropped_stage import DroppedStage
from planner.training.oom_report import ActionMemory, FailureReport, Stop, allocation_in
from profiler.measurement.device_memory import is_limited, ran_out
from profiler.measurement.meter import Mark, MarkedPhases, Meter, WarmUp, step_memory_meter
from profiler.measurement.planned_probe import PlannedProbe
from profiler.workload.compiled_forwards import is_compiled, unwrapped
from profiler.workload.random_states import RandomState
from profiler.workload.remembered_values import Restoring
from profiler.workload.snapshot import captured, modules_of, preserved, remember_modules
from profiler.workload.steps import causes_of
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import StepPhase, Workload

# The most steps that are trained again after an unfinished update. Such a copy takes 2 to 3 % of one step of the zoo's
# gpt2, resnet50 and mlp on a CPU, and what is remembered before every step 0.3 to 0.5 % of it (process time).
COPY_EVERY_STEPS = 100
LEAST_CUT = 0.05  # of the budget: what a retry takes off at least


class StepRollback:
    """Runs training steps, and can undo the one that failed.

    Until the optimizer's step begins only buffers, attributes of modules and random states have changed: they are
    copied to host memory before every step. An optimizer's step that fails may have changed some of the parameters and
    states. With ``copies`` these lie in host memory, too, from every 100th step; undoing then goes back to there, and
    the steps since are to be trained again, which gives the same where kernels are deterministic.
    """

    def __init__(self, workload: Workload, *, copies: bool) -> None:
        self._workload = workload
        self._copies = copies
        self._copied_at = 0
        self._restore: Callable[[], None] | None = None
        self._before: _BeforeStep | None = None
        self._step = 0
        self.phase: PhaseName | None = None

    def run(self, step: int) -> float:
        """One whole training step, as ``Workload.step``; its loss.

        Args:
            step: how many come before; this one may also be one that was undone.
        """
        self.phase, self._before, self._step = None, None, step  # Nothing is to be undone before forward begins.
        loss = self._workload.step(self._begin)
        self.phase = None
        return loss

    def _begin(self, phase: StepPhase, _: Tensor | None) -> None:
        if phase == "forward":
            self._remember(self._step)
        if phase not in ("evaluation", "end"):  # An evaluation is a part of the optimizer's step.
            self.phase = phase

    def _remember(self, step: int) -> None:
        if self._copies and (self._restore is None or step >= self._copied_at + COPY_EVERY_STEPS):
            self._restore, self._copied_at = _copied(self._workload), step
        self._before = _BeforeStep(self._workload)

    def undo(self) -> int | None:
        """Put the workload back; how many steps are done then. None: half a step is, and cannot be undone."""
        self._workload.zero_grad()
        before, self._before = self._before, None
        if before is None:
            return self._step
        if self.phase != "optimizer" and not before.updated():
            before.restore()
            return self._step
        if self._restore is None:
            return None
        self._restore()
        self._workload.zero_grad()
        return self._copied_at


class _BeforeStep:
    """The state that forward and backward change: buffers, attributes of modules, random states.

    The versions of parameters show whether these were changed, too.
    """

    def __init__(self, workload: Workload) -> None:
        self._back = Restoring()
        self._back.add("random states", RandomState().restore)
        remember_modules(modules_of(workload), self._back)
        fixed: list[Tensor] = [*workload.model.parameters(), *workload.parameters_beside()]
        self._versions = [(tensor, tensor._version) for tensor in [*fixed, *tensors_in(workload.inputs)]]

    def updated(self) -> bool:
        """Whether a parameter or the batch has changed: by an optimizer that steps during backward, say."""
        return any(tensor._version != version for tensor, version in self._versions)

    def restore(self) -> None:
        self._back.restore()


def _copied(workload: Workload) -> Callable[[], None]:
    """A copy of everything but gradients, which a step begins without; returns the call that restores it."""
    gradients = [(parameter, parameter.grad) for parameter in workload.with_gradients()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        return captured(workload)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def wanted_bytes(plan: Plan, report: FailureReport) -> int:
    """The bytes that the plan after a failure may use: those that the device gave, and at most 95 % of this plan's."""
    wanted = max(1, int(_used_bytes(plan) * (1 - LEAST_CUT)))
    if report.actual_bytes and report.repeated and report.phase != "optimizer":
        return min(wanted, report.actual_bytes)
    return wanted


def smaller_plan(plan: Plan, report: FailureReport) -> Plan:
    """The plan to try after a failure: within ``wanted_bytes``; where none fits into that, the one that needs least.

    Raises:
        ValueError: the plan cannot be solved for another budget, or none needs less.
    """
    try:
        return _solved_for(plan, wanted_bytes(plan, report))
    except Infeasible as refusal:
        least_bytes, reason = refusal.minimum_budget_bytes, refusal.reason
    if least_bytes >= _used_bytes(plan):
        raise ValueError(f"no plan needs less: {reason}; planner advise TARGET --budget B names other ways to save")
    return _solved_for(plan, least_bytes)


def _solved_for(plan: Plan, budget_bytes: int) -> Plan:
    """Solves without integer programs: on a CPU they use the memory that is short, and training waits for them."""
    return replan(plan, budget_bytes, time_limit_seconds=SEARCH_SECONDS)


def _used_bytes(plan: Plan) -> int:
    return min(plan.budget_bytes - plan.headroom_bytes, plan.predicted_peak_bytes)


def stop_of(error: BaseException, model: nn.Module, plan: Plan, *, step: int, phase: PhaseName | None) -> Stop:
    """The facts in an error that ``ran_out`` accepts; holds no tensor and no frame."""
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
    """The stages in a traceback: in forward by their modules, in backward where they are recomputed."""
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
    """Returns the report of a failure; repeats the step under a meter, and leaves the workload as it is.

    Args:
        workload: without a plan, and with the failed step's tensors gone.
        plan: the plan of the failed step.
        stop: the facts in its error.
        restored: whether the failed step was undone.
    """
    spans, repeated = _repeated(workload, plan)
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


def _repeated(workload: Workload, plan: Plan) -> tuple[list[Span], bool]:
    """Returns the actions of a repeated step, and whether it ran out of memory, too; no actions of a compiled model.

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
