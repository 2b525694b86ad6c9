"""Plans of single ops over a step: the bytes alive, run by run, and what is alive at the peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.explain.peak import KEPT, MADE_AGAIN, Peak, PeakPart
from planner.explain.timeline import PhaseName, Span, SpanKind, Timeline
from planner.plans.graph_plan import GraphPlan
from profiler.step_graph import Side, StepOp
from profiler.step_replay import (
    AliveStorage,
    SideReplay,
    StepCopy,
    StepRuns,
    alive_during,
    alive_during_each,
    replay_step,
    runs_once,
)

MADE = "made in this phase"
RETURNED = "outputs of the model"
OF_LOSS = "gradients of outputs"
GRADIENTS = "gradients of parameters and inputs"
STATES = "states of random generators"
RESIDENT = "resident (parameters, optimizer states, batch)"
TRANSIENT = "held by the op while it runs"
AROUND = "around the ops (the loss, what the loop holds)"


def graph_timelines(plan: GraphPlan) -> list[Timeline]:
    """The step in which every op runs once, as it was traced, and the plan's.

    Of a step with several micro-batches, the one that takes the most. Ops take the seconds that were measured of each
    alone; what the step takes besides stands at its end, with the optimizer's step.
    """
    once_seconds = plan.predicted_seconds - plan.recomputed_seconds - plan.stall_seconds
    once = _Spans(plan, runs_once(plan.graph), (), once_seconds)
    planned = _Spans(plan, plan.runs, plan.copies, plan.predicted_seconds)
    return [
        Timeline(source="predicted", planned=spans is planned, spans=tuple(spans.spans())) for spans in (once, planned)
    ]


class _Spans:
    """The runs of a step as spans, one after another."""

    def __init__(self, plan: GraphPlan, runs: StepRuns, copies: tuple[StepCopy, ...], seconds: float) -> None:
        self._plan, self._runs, self._copies = plan, runs, copies
        self._seconds = seconds
        self._now = 0.0
        self._ran: set[int] = set()

    def spans(self) -> Iterator[Span]:
        plan, around = self._plan, self._plan.around
        replayed = replay_step(plan.graph, self._runs, held=around.held_bytes > 0, copies=self._copies)
        yield from self._side("forward", self._runs.forward, replayed.forward, around.forward_bytes)
        between_bytes = around.forward_bytes + replayed.between_bytes
        peak_bytes = around.loss_bytes + replayed.between_bytes + around.kept_longer_bytes(plan.graph, replayed)
        at_loss = between_bytes, peak_bytes, between_bytes
        yield self._span("backward", "loss", at_loss)
        yield from self._side("backward", self._runs.backward, replayed.backward, around.backward_bytes)
        left_bytes = around.backward_bytes + replayed.backward.end_bytes
        sizes = left_bytes, around.other_peak_bytes, left_bytes
        yield self._span("optimizer", "optimizer", sizes, seconds=max(0.0, self._seconds - self._now))

    def _side(self, side: Side, ordinals: Sequence[int], replayed: SideReplay, base_bytes: int) -> Iterator[Span]:
        before = base_bytes + replayed.start_bytes
        for ordinal, peak, alive in zip(ordinals, replayed.peaks, replayed.alive, strict=True):
            op = self._plan.graph.ops[ordinal]
            action: SpanKind = "recompute" if ordinal in self._ran else side
            sizes = before, base_bytes + peak, base_bytes + alive
            yield self._span(side, action, sizes, op=op.name, seconds=op.seconds)
            self._ran.add(ordinal)
            before = base_bytes + alive

    def _span(
        self, phase: PhaseName, action: SpanKind, sizes: tuple[int, int, int], *, op: str = "", seconds: float = 0.0
    ) -> Span:
        before_bytes, _, after_bytes = sizes
        began, self._now = self._now, self._now + seconds
        return Span(
            phase=phase,
            stage=op,
            action=action,
            start_seconds=began,
            end_seconds=self._now,
            before_bytes=before_bytes,
            peak_bytes=max(sizes),
            after_bytes=after_bytes,
        )


def graph_peak(plan: GraphPlan, timeline: Timeline) -> Peak:
    """Explain the highest moment of a planned step by what the replay holds then.

    Args:
        plan: of single ops.
        timeline: the plan's, of ``graph_timelines``.
    """
    span = timeline.peak
    return next(
        moment for each, moment in zip(timeline.spans, graph_moments(plan, timeline), strict=True) if each is span
    )


def graph_moments(plan: GraphPlan, timeline: Timeline) -> Iterator[Peak]:
    """Explain the highest moment of every run of a planned step in turn; arguments as for ``graph_peak``."""
    ops, held = {op.name: op for op in plan.graph.ops}, plan.around.held_bytes > 0
    alive_in: dict[str, Iterator[Sequence[AliveStorage]]] = {
        side: alive_during_each(plan.graph, plan.runs, side, held=held, copies=plan.copies)
        for side in ("forward", "backward")
    }
    parts_of = _PartsOf(plan)
    for span in timeline.spans:
        op, parts = ops.get(span.stage), []
        if span.action == "loss":
            parts = parts_of.alive(_between(plan))
        elif op is not None:
            transient = _transient(op, again=span.action == "recompute")
            parts = [*parts_of.alive(next(alive_in[span.phase])), transient]
        yield _explained(plan, timeline, span, op, parts)


def _explained(plan: GraphPlan, timeline: Timeline, span: Span, op: StepOp | None, parts: list[PeakPart]) -> Peak:
    left = span.peak_bytes - sum(part.size_bytes for part in parts)
    resident_bytes = min(plan.resident_bytes, left)
    parts.append(PeakPart(what=RESIDENT, size_bytes=resident_bytes))
    parts.append(PeakPart(what=AROUND, size_bytes=left - resident_bytes))
    return Peak(
        source=timeline.source,
        peak_bytes=span.peak_bytes,
        phase=span.phase,
        stage="" if op is None else op.module or op.name,
        action=span.action,
        op="" if op is None else op.op,
        seconds=(span.start_seconds + span.end_seconds) / 2,
        parts=tuple(part for part in parts if part.size_bytes),
    )


def _between(plan: GraphPlan) -> list[AliveStorage]:
    """What forward hands over and returns."""
    held, storages = plan.around.held_bytes > 0, plan.graph.storages
    handed = replay_step(plan.graph, plan.runs, held=held, copies=plan.copies).handed
    last = len(plan.runs.forward) - 1
    after = alive_during(plan.graph, plan.runs, "forward", last, held=held, copies=plan.copies, after=True)
    return [s for s in after if s.number in handed or (s.number < len(storages) and storages[s.number].returned)]


class _PartsOf:
    """Storages of a plan with what they are there for, and what made them."""

    def __init__(self, plan: GraphPlan) -> None:
        self._plan = plan
        self._makers = {storage: op for op in plan.graph.ops for storage in op.makes}

    def alive(self, storages: Iterable[AliveStorage]) -> list[PeakPart]:
        return [self._part(each) for each in storages]

    def _part(self, alive: AliveStorage) -> PeakPart:
        graph = self._plan.graph
        if alive.number >= len(graph.storages):
            return _part(STATES, alive.size_bytes, graph.ops[alive.number - len(graph.storages)])
        return _part(_what(self._plan, alive), alive.size_bytes, self._makers.get(alive.number))


def _what(plan: GraphPlan, alive: AliveStorage) -> str:
    storage = plan.graph.storages[alive.number]
    if storage.of_loss:
        return OF_LOSS
    if storage.gradient:
        return GRADIENTS
    if alive.again:
        return MADE_AGAIN
    if storage.returned:
        return RETURNED
    return KEPT if alive.taken else MADE


def _transient(op: StepOp, *, again: bool) -> PeakPart:
    return _part(TRANSIENT, op.transient_bytes + (op.state_bytes if again else 0), op)


def _part(what: str, size_bytes: int, op: StepOp | None) -> PeakPart:
    if op is None:
        return PeakPart(what=what, size_bytes=size_bytes, tensors=1)
    return PeakPart(what=what, size_bytes=size_bytes, op=op.op, stage=op.module or op.name, phase=op.side, tensors=1)
