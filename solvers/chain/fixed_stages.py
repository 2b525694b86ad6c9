"""Restriction: a chain in which it is fixed what happens to some stages, and schedules of it as those of the chain.

Formulation: consecutive stages with one fixed fate are a piece. In the restricted chain a piece is a single stage that
runs once and has one option: a stage kept with an option, or a segment that keeps its input, runs forward without
keeping anything and is made again before its backward. What a segment costs is replayed, so seconds and bytes are
those of its actions in the chain itself. Stages left to the solver stay as they are.

Guarantee: a schedule of the restricted chain needs at least the bytes, and exactly the seconds, of its counterpart in
the chain. Shared tensors that a segment has to do with are counted for as long as it might hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from solvers.problem.chain import Chain, Option, Shared, Stage
from solvers.problem.chain_schedule import Action, Schedule
from solvers.problem.chain_simulator import ReplayedAction, replay


@dataclass(frozen=True, slots=True)
class FixedSpan:
    """Stages ``start..end-1`` and what happens to them.

    Attributes:
        option: a single stage is kept with this one; None: they run again together, from the first one's input.
        free: a single stage that the solver decides for.
    """

    start: int
    end: int
    option: int | None = None
    free: bool = False


def schedule_of(pieces: Sequence[FixedSpan]) -> Schedule:
    """The schedule of a chain of which everything is fixed."""
    actions = [action for piece in pieces for action in _forward(piece)]
    for piece in reversed(pieces):
        actions += [Action("free", piece.end - 1), *_backward(piece)]
    return Schedule(actions=tuple(actions))


def restricted(chain: Chain, pieces: Sequence[FixedSpan]) -> Chain:
    """The chain whose stages are the pieces."""
    place = {k: number for number, piece in enumerate(pieces) for k in range(piece.start, piece.end)}
    segments = {number for number, piece in enumerate(pieces) if not piece.free and piece.option is None}
    extra = _hidden_bytes(chain, pieces, segments, place)
    return replace(
        chain,
        stages=tuple(_stage(chain, piece, extra[number]) for number, piece in enumerate(pieces)),
        shared=tuple(_shared(tensor, place, segments, pieces) for tensor in chain.shared),
    )


def expanded(schedule: Schedule, pieces: Sequence[FixedSpan]) -> Schedule:
    """A schedule of the restricted chain as one of the chain itself."""
    return Schedule(actions=tuple(a for action in schedule.actions for a in _expanded(action, pieces[action.stage])))


def _expanded(action: Action, piece: FixedSpan) -> list[Action]:
    if piece.free or action.kind == "free":
        return [replace(action, stage=piece.end - 1)]
    return _forward(piece) if action.kind == "forward" else _backward(piece)


def _forward(piece: FixedSpan) -> list[Action]:
    """The first forward of a fixed piece."""
    actions = [Action("forward", piece.start, piece.option)]
    for k in range(piece.start + 1, piece.end):
        actions += [Action("forward", k), Action("free", k - 1)]
    return actions


def _backward(piece: FixedSpan) -> list[Action]:
    """Its backward, with what is made again for it; the boundary behind it is free by then."""
    last = piece.end - 1
    if piece.option is not None:
        return [Action("backward", last)]
    actions = [Action("forward", k, 0) for k in range(piece.start, last)]
    actions += [Action("recompute", last, 0), Action("backward", last)]
    for k in reversed(range(piece.start, last)):
        actions += [Action("free", k), Action("backward", k)]
    return actions


def _stage(chain: Chain, piece: FixedSpan, extra: tuple[int, int]) -> Stage:
    if piece.free:
        return chain.stages[piece.start]
    if piece.option is not None:
        stage = chain.stages[piece.start]
        return replace(stage, options=(stage.options[piece.option],), recomputable=False)
    return _segment(chain, piece, extra)


def _segment(chain: Chain, piece: FixedSpan, extra: tuple[int, int]) -> Stage:
    """The costs of a segment, replayed alone: its forward, then (behind a stage of no cost) its backward."""
    stages = chain.stages[piece.start : piece.end]
    nothing = Option(
        forward_seconds=0, backward_seconds=0, kept_bytes=0, forward_peak_bytes=0, backward_peak_bytes=0,
        recompute_seconds=0, recompute_peak_bytes=0,
    )  # fmt: skip
    behind = Stage(name="", options=(nothing,), boundary_bytes=0, forward_seconds=0, forward_peak_bytes=0)
    own = FixedSpan(0, len(stages))
    first, again = _forward(own), _backward(own)
    count = len(stages)
    between = [Action("forward", count, 0), Action("backward", count), Action("free", count - 1)]
    moments = replay(
        Chain(stages=(*stages, behind)), Schedule(actions=(*first, *between, Action("free", count), *again))
    ).timeline
    forward, before, backward = moments[: len(first)], moments[-len(again) - 1], moments[-len(again) :]
    kept_bytes = sum(stage.residue_bytes for stage in stages)
    last = stages[-1]
    option = Option(
        name="recompute",
        forward_seconds=sum(moment.seconds for moment in forward),
        backward_seconds=sum(moment.seconds for moment in backward),
        kept_bytes=kept_bytes,
        forward_peak_bytes=_peak(forward, 0) + extra[0],
        backward_peak_bytes=_peak(backward, before.after_bytes) + extra[1],
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


def _peak(moments: Sequence[ReplayedAction], before_bytes: int) -> int:
    return max(0, max(moment.peak_bytes for moment in moments) - before_bytes)


def _hidden_bytes(
    chain: Chain, pieces: Sequence[FixedSpan], segments: set[int], place: dict[int, int]
) -> list[tuple[int, int]]:
    """Bytes of shared tensors that a segment alone holds for a while: in its forward, and in its backward."""
    found = [(0, 0)] * len(pieces)
    for tensor in chain.shared:
        dies = place[tensor.forward_death]
        if dies in segments and not (tensor.born < pieces[dies].start == tensor.forward_death):
            found[dies] = (found[dies][0] + tensor.size_bytes, found[dies][1])
        for number in segments & {place[k] for k in tensor.savers}:
            if number not in _holders(tensor, place, segments, pieces):
                found[number] = (found[number][0], found[number][1] + tensor.size_bytes)
    return found


def _shared(tensor: Shared, place: dict[int, int], segments: set[int], pieces: Sequence[FixedSpan]) -> Shared:
    free = {number for number, piece in enumerate(pieces) if piece.free}
    savers = {place[k] for k in tensor.savers} - segments
    return Shared(
        size_bytes=tensor.size_bytes,
        born=place[tensor.born],
        forward_death=place[tensor.forward_death],
        readers=tuple(sorted({place[k] for k in tensor.readers} & free)),
        linked_readers=tuple(sorted({place[k] for k in tensor.linked_readers} & free)),
        savers=tuple(sorted(savers | _holders(tensor, place, segments, pieces))),
        held_until=None if tensor.held_until is None else place[tensor.held_until],
    )


def _holders(tensor: Shared, place: dict[int, int], segments: set[int], pieces: Sequence[FixedSpan]) -> set[int]:
    """Segments that hold a shared tensor from their forward on: it is an input of a stage in them."""
    first = {pieces[number].start for number in segments}
    held = {place[k] for k in tensor.readers} | {place[k] for k in tensor.linked_readers if k in first}
    return held & segments
