"""Chains in which it is fixed what happens to some stages, and their schedules as those of the whole chain.

Formulation: a span is a segment of which one thing is fixed for all stages. In the restricted chain it is a single
stage that runs once and has one option: a stage kept with an option, or stages that keep their input, run forward
without keeping anything and run again before their backward. What these cost is replayed, so seconds and bytes are
those of their actions in the chain itself. Stages left to the solver stay as they are.

Guarantee: a schedule of the restricted chain needs at least the bytes, and exactly the seconds, of its counterpart in
the chain. Shared tensors that a span reads or keeps are counted for as long as it might hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from solvers.chain.segments import Segment, first_pass, second_pass
from solvers.problem.chain import Chain, Option, Shared, Stage
from solvers.problem.chain_schedule import Action, Schedule
from solvers.problem.chain_simulator import ReplayedAction, replay


def restricted(chain: Chain, spans: Sequence[Segment]) -> Chain:
    """The chain whose stages are the spans."""
    span_of = {k: number for number, span in enumerate(spans) for k in range(span.start, span.end)}
    rerun = {number for number, span in enumerate(spans) if not span.undecided and not span.kept}
    hidden_bytes = _hidden_bytes(chain, spans, rerun, span_of)
    return replace(
        chain,
        stages=tuple(_stage_of(chain, span, hidden_bytes[number]) for number, span in enumerate(spans)),
        shared=tuple(_shared(tensor, span_of, rerun, spans) for tensor in chain.shared),
    )


def expanded(schedule: Schedule, spans: Sequence[Segment]) -> Schedule:
    """A schedule of the restricted chain as one of the chain itself."""
    return Schedule(actions=tuple(a for action in schedule.actions for a in _expanded(action, spans[action.stage])))


def _expanded(action: Action, span: Segment) -> list[Action]:
    if span.undecided or action.kind == "free":
        return [replace(action, stage=span.end - 1)]
    run = first_pass if action.kind == "forward" else second_pass
    return list(run(span.start, span.end, span.option))


def _stage_of(chain: Chain, span: Segment, hidden_bytes: Sequence[int]) -> Stage:
    if span.undecided:
        return chain.stages[span.start]
    if span.option is not None:
        stage = chain.stages[span.start]
        return replace(stage, options=(stage.options[span.option],), recomputable=False)
    return _rerun_stage(chain, span, hidden_bytes)


def _rerun_stage(chain: Chain, span: Segment, hidden_bytes: Sequence[int]) -> Stage:
    """The costs of stages that run again, replayed alone: forwards, then (after a stage of no cost) backwards."""
    stages = chain.stages[span.start : span.end]
    no_cost = Option(
        forward_seconds=0, backward_seconds=0, kept_bytes=0, forward_peak_bytes=0, backward_peak_bytes=0,
        recompute_seconds=0, recompute_peak_bytes=0,
    )  # fmt: skip
    next_stage = Stage(name="", options=(no_cost,), boundary_bytes=0, forward_seconds=0, forward_peak_bytes=0)
    count = len(stages)
    first_run, second_run = list(first_pass(0, count, None)), list(second_pass(0, count, None))
    between = [Action("forward", count, 0), Action("backward", count), Action("free", count - 1)]
    timeline = replay(
        Chain(stages=(*stages, next_stage)),
        Schedule(actions=(*first_run, *between, Action("free", count), *second_run)),
    ).timeline
    forward, before, backward = timeline[: len(first_run)], timeline[-len(second_run) - 1], timeline[-len(second_run) :]
    kept_bytes = sum(stage.residue_bytes for stage in stages)
    last = stages[-1]
    option = Option(
        name="recompute",
        forward_seconds=sum(entry.seconds for entry in forward),
        backward_seconds=sum(entry.seconds for entry in backward),
        kept_bytes=kept_bytes,
        forward_peak_bytes=_peak(forward, 0) + hidden_bytes[0],
        backward_peak_bytes=_peak(backward, before.after_bytes) + hidden_bytes[1],
        recompute_seconds=0,
        recompute_peak_bytes=0,
    )
    return Stage(
        name=f"{stages[0].name} to {last.name}" if count > 1 else last.name,
        options=(option,),
        boundary_bytes=last.boundary_bytes,
        forward_seconds=option.forward_seconds,
        forward_peak_bytes=option.forward_peak_bytes,
        parameter_gradient_bytes=sum(stage.parameter_gradient_bytes for stage in stages),
        gradient_bytes=last.gradient_bytes,
        recomputable=False,
        linked=stages[0].linked,
    )


def _peak(entries: Sequence[ReplayedAction], before_bytes: int) -> int:
    return max(0, max(entry.peak_bytes for entry in entries) - before_bytes)


def _hidden_bytes(chain: Chain, spans: Sequence[Segment], rerun: set[int], span_of: dict[int, int]) -> list[list[int]]:
    """Bytes of shared tensors that only a span of ``rerun`` holds for a while: in its forward, and in its backward."""
    hidden_bytes = [[0, 0] for _ in spans]
    for tensor in chain.shared:
        last = span_of[tensor.forward_death]
        if last in rerun and not (tensor.born < spans[last].start == tensor.forward_death):
            hidden_bytes[last][0] += tensor.size_bytes
        if last in rerun and tensor.forward_death_is_early:
            hidden_bytes[last][0] += tensor.size_bytes
        early = _span_at(tensor.early_backward_death, span_of)
        if early in rerun:
            hidden_bytes[early][1] += tensor.size_bytes
        for number in rerun & {span_of[k] for k in tensor.savers}:
            if number not in _holders(tensor, span_of, rerun, spans):
                hidden_bytes[number][1] += tensor.size_bytes
    return hidden_bytes


def _span_at(stage: int | None, span_of: dict[int, int]) -> int | None:
    return None if stage is None else span_of[stage]


def _shared(tensor: Shared, span_of: dict[int, int], rerun: set[int], spans: Sequence[Segment]) -> Shared:
    undecided = {number for number, span in enumerate(spans) if span.undecided}
    savers = {span_of[k] for k in tensor.savers} - rerun
    early = _span_at(tensor.early_backward_death, span_of)
    return Shared(
        size_bytes=tensor.size_bytes,
        born=span_of[tensor.born],
        forward_death=span_of[tensor.forward_death],
        readers=tuple(sorted({span_of[k] for k in tensor.readers} & undecided)),
        linked_readers=tuple(sorted({span_of[k] for k in tensor.linked_readers} & undecided)),
        savers=tuple(sorted(savers | _holders(tensor, span_of, rerun, spans))),
        held_until=_span_at(tensor.held_until, span_of),
        forward_death_is_early=tensor.forward_death_is_early and span_of[tensor.forward_death] not in rerun,
        early_backward_death=None if early in rerun else early,
    )


def _holders(tensor: Shared, span_of: dict[int, int], rerun: set[int], spans: Sequence[Segment]) -> set[int]:
    """Spans of ``rerun`` that hold a shared tensor from their forward on: it is an input of a stage in them."""
    starts = {spans[number].start for number in rerun}
    holders = {span_of[k] for k in tensor.readers} | {span_of[k] for k in tensor.linked_readers if k in starts}
    return holders & rerun
