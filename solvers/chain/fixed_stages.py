"""Chains in which it is fixed what happens to some stages, and their schedules as those of the whole chain.

Formulation: a span is a segment of which one thing is fixed for all stages. In the restricted chain it is a single
stage that runs once and has one option: a stage kept with an option, or stages that keep their input, run forward
without keeping anything and run again before their backward. What these cost is replayed, so seconds and bytes are
those of their actions in the chain itself. Stages left to the solver stay as they are.

Guarantee: a schedule of the restricted chain needs at least the bytes, and exactly the seconds, of its counterpart in
the chain; exactly its bytes where no tensors are shared. Shared ones that a span reads or keeps are counted for as long
as it might hold them, so that proofs need the restriction of the chain without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from solvers.chain.baselines import Segment, first_pass, second_pass
from solvers.problem.chain import Chain, Option, Shared, Stage
from solvers.problem.schedule import Action, Schedule
from solvers.problem.simulator import ReplayedAction, replay


def restricted(chain: Chain, spans: Sequence[Segment]) -> Chain:
    """The chain whose stages are the spans."""
    cut = _Cut(chain, spans)
    return replace(
        chain,
        stages=tuple(_stage_of(cut, number) for number in range(len(spans))),
        shared=tuple(_shared(tensor, cut) for tensor in chain.shared),
    )


class _Cut:
    """A chain cut into spans, and who holds its shared tensors."""

    def __init__(self, chain: Chain, spans: Sequence[Segment]) -> None:
        self.chain, self.spans = chain, spans
        self.span_of = {k: number for number, span in enumerate(spans) for k in range(span.start, span.end)}
        self.undecided = {number for number, span in enumerate(spans) if span.undecided}
        self.rerun = {number for number, span in enumerate(spans) if not span.undecided and not span.kept}

    def holders(self, tensor: Shared) -> set[int]:
        """Spans of ``rerun`` that hold a shared tensor from their forward on: it is an input of a stage in them."""
        starts = {self.spans[number].start for number in self.rerun}
        readers = {*tensor.readers, *(k for k in tensor.linked_readers if k in starts)}
        return {self.span_of[k] for k in readers} & self.rerun

    def held_before(self, tensor: Shared, number: int) -> bool:
        """Whether spans before one hold a shared tensor until their backward, whatever the solver decides."""
        kept = {self.span_of[k] for k in tensor.savers} - self.rerun - self.undecided
        return any(holder < number for holder in kept | self.holders(tensor))

    def may_drop(self, k: int) -> bool:
        """Whether a stage may keep nothing at first."""
        return self.span_of[k] in self.rerun or self.span_of[k] in self.undecided


def expanded(schedule: Schedule, spans: Sequence[Segment]) -> Schedule:
    """A schedule of the restricted chain as one of the chain itself."""
    return Schedule(actions=tuple(a for action in schedule.actions for a in _expanded(action, spans[action.stage])))


def _expanded(action: Action, span: Segment) -> list[Action]:
    if span.undecided or action.kind == "free":
        return [replace(action, stage=span.end - 1)]
    run = first_pass if action.kind == "forward" else second_pass
    return list(run(span.start, span.end, span.option))


def _stage_of(cut: _Cut, number: int) -> Stage:
    span = cut.spans[number]
    if span.undecided:
        return cut.chain.stages[span.start]
    if span.option is not None:
        stage = cut.chain.stages[span.start]
        return replace(stage, options=(stage.options[span.option],), recomputable=False)
    return _rerun_stage(cut, number)


def _rerun_stage(cut: _Cut, number: int) -> Stage:
    """The costs of stages that run again, replayed alone with the shared tensors that only they hold."""
    span = cut.spans[number]
    stages = cut.chain.stages[span.start : span.end]
    alone = _run_again(stages, [])
    in_forward = _run_again(*_held_in_forward(cut, number)).forward
    in_backward = _run_again(*_held_in_backward(cut, number)).backward
    first, last = stages[0], stages[-1]
    forward_peak_bytes = _peak(in_forward, 0)
    if span.end == len(cut.chain.stages) and len(stages) > 1:  # The loss comes before what this stage read is freed.
        end_bytes = in_forward[-2].after_bytes + last.gradient_bytes
        forward_peak_bytes = max(forward_peak_bytes, end_bytes)
    option = Option(
        name="recompute",
        forward_seconds=sum(entry.seconds for entry in alone.forward),
        backward_seconds=sum(entry.seconds for entry in alone.backward),
        kept_bytes=sum(stage.residue_bytes for stage in stages),
        forward_peak_bytes=forward_peak_bytes,
        backward_peak_bytes=_peak(in_backward, alone.before_bytes),
        recompute_seconds=0,
        recompute_peak_bytes=0,
    )
    return Stage(
        name=f"{first.name} to {last.name}" if len(stages) > 1 else last.name,
        options=(option,),
        boundary_bytes=last.boundary_bytes,
        forward_seconds=option.forward_seconds,
        forward_peak_bytes=option.forward_peak_bytes,
        parameter_gradient_bytes=sum(stage.parameter_gradient_bytes for stage in stages),
        gradient_bytes=last.gradient_bytes,
        recomputable=False,
        linked=first.linked,
    )


class _RunAgain(NamedTuple):
    """The actions of stages that run again, and the bytes alive before their second runs begin."""

    forward: Sequence[ReplayedAction]
    before_bytes: int
    backward: Sequence[ReplayedAction]


def _run_again(stages: Sequence[Stage], shared: Sequence[Shared]) -> _RunAgain:
    """Stages that run forward, and again once the backward of a stage of no cost after them is over."""
    no_cost = Option(
        forward_seconds=0, backward_seconds=0, kept_bytes=0, forward_peak_bytes=0, backward_peak_bytes=0,
        recompute_seconds=0, recompute_peak_bytes=0,
    )  # fmt: skip
    next_stage = Stage(name="", options=(no_cost,), boundary_bytes=0, forward_seconds=0, forward_peak_bytes=0)
    count = len(stages)
    first, second = [*first_pass(0, count, None)], [*second_pass(0, count, None)]
    between = [Action("forward", count, 0), Action("backward", count), Action("free", count - 1), Action("free", count)]
    chain = Chain(stages=(*stages, next_stage), shared=tuple(shared))
    timeline = replay(chain, Schedule(actions=(*first, *between, *second))).timeline
    return _RunAgain(timeline[: len(first)], timeline[-len(second) - 1].after_bytes, timeline[-len(second) :])


def _peak(entries: Sequence[ReplayedAction], before_bytes: int) -> int:
    return max(0, max(entry.peak_bytes for entry in entries) - before_bytes)


def _held_in_forward(cut: _Cut, number: int) -> tuple[list[Stage], list[Shared]]:
    """The stages of a span of ``rerun`` and the shared tensors that their first forwards hold.

    Those that the restricted chain counts as the span begins are left out, but for what adds to a peak.
    """
    span = cut.spans[number]
    stages, shared = list(cut.chain.stages[span.start : span.end]), list[Shared]()
    for tensor in cut.chain.shared:
        death = tensor.forward_death
        if span.start <= death < span.end and tensor.forward_death_is_early and _held_on_in_forward(tensor, cut):
            k = death - span.start
            stages[k] = replace(stages[k], forward_peak_bytes=stages[k].forward_peak_bytes + tensor.size_bytes)
        counted = tensor.born < span.start and (death >= span.start or cut.held_before(tensor, number))
        if not counted and tensor.born < span.end:
            holding = {span.start} & {*tensor.linked_readers}  # its boundary is alive as long as it waits
            if span.end == len(cut.chain.stages) and tensor.held_until is not None:
                death = span.end
            shared.append(
                Shared(
                    size_bytes=tensor.size_bytes,
                    born=max(0, tensor.born - span.start),
                    forward_death=max(0, min(death, span.end) - span.start),
                    readers=_inside({*tensor.readers, *holding}, span),
                    linked_readers=_inside(tensor.linked_readers, span),
                )
            )
    return stages, shared


def _held_in_backward(cut: _Cut, number: int) -> tuple[list[Stage], list[Shared]]:
    """The same of their second runs and backwards."""
    span = cut.spans[number]
    stages, shared = list(cut.chain.stages[span.start : span.end]), list[Shared]()
    for tensor in cut.chain.shared:
        death, until = tensor.early_backward_death, tensor.held_until
        if death is not None and span.start <= death < span.end and _held_on_in_backward(tensor, death, cut):
            k = death - span.start
            stages[k] = _with_higher_backward(stages[k], tensor.size_bytes)
        counted = number in cut.holders(tensor) or cut.held_before(tensor, number)
        if not counted and not (until is not None and until < span.end):
            shared.append(
                Shared(
                    size_bytes=tensor.size_bytes,
                    born=0,
                    forward_death=0,
                    linked_readers=_inside(tensor.linked_readers, span),
                    savers=_inside(tensor.savers, span),
                )
            )
    return stages, shared


def _inside(stages: Iterable[int], span: Segment) -> tuple[int, ...]:
    """The fixed stages that a span contains, by their place in it."""
    return tuple(sorted(k - span.start for k in stages if span.start <= k < span.end))


def _with_higher_backward(stage: Stage, extra_bytes: int) -> Stage:
    options = (replace(o, backward_peak_bytes=o.backward_peak_bytes + extra_bytes) for o in stage.options)
    return replace(stage, options=tuple(options))


def _held_on_in_forward(tensor: Shared, cut: _Cut) -> bool:
    """Whether anything may hold a shared tensor as the forward of a dropped stage, its death, has let go of it."""
    death = tensor.forward_death
    if death in tensor.readers:
        return False  # with which its peak is given
    saved = any(k <= death and cut.span_of[k] not in cut.rerun for k in tensor.savers)
    waits = any(k <= death and cut.may_drop(k) for k in (*tensor.readers, *tensor.linked_readers))
    return saved or waits or (tensor.held_until is not None and death == len(cut.chain.stages) - 1)


def _held_on_in_backward(tensor: Shared, death: int, cut: _Cut) -> bool:
    """Whether anything may hold it as the backward of a stage that runs again has let go of it."""
    start = cut.spans[cut.span_of[death]].start
    saved = any(k < death and (k >= start or cut.span_of[k] not in cut.rerun) for k in tensor.savers)
    waits = any(k < start and cut.may_drop(k) for k in (*tensor.readers, *tensor.linked_readers))
    return saved or waits or (tensor.held_until is not None and tensor.held_until < death)


def _shared(tensor: Shared, cut: _Cut) -> Shared:
    span_of, rerun, undecided = cut.span_of, cut.rerun, cut.undecided
    savers = {span_of[k] for k in tensor.savers} - rerun
    until, early = (None if k is None else span_of[k] for k in (tensor.held_until, tensor.early_backward_death))
    return Shared(
        size_bytes=tensor.size_bytes,
        born=span_of[tensor.born],
        forward_death=span_of[tensor.forward_death],
        readers=tuple(sorted({span_of[k] for k in tensor.readers} & undecided)),
        linked_readers=tuple(sorted({span_of[k] for k in tensor.linked_readers} & undecided)),
        savers=tuple(sorted(savers | cut.holders(tensor))),
        held_until=until,
        forward_death_is_early=tensor.forward_death_is_early and span_of[tensor.forward_death] not in rerun,
        early_backward_death=None if early in rerun else early,
    )
