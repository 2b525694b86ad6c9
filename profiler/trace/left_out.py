"""Blocks that would be stages if they could run a second time: where the cut had to go around them, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from profiler.records import LeftOutRecord
from profiler.trace.obstacles import remedy_for, why_not_recomputable
from profiler.trace.partition import ChosenStage, best_cut, could_be_stage, stage_name
from profiler.trace.stage_names import calls_inside
from profiler.trace.step_record import Call, Trace

# Of all that is saved for backward: blocks that keep less of it are not what stands in the way.
LEAST_SHARE = 0.05


def left_out_of(trace: Trace, stages: Sequence[ChosenStage]) -> tuple[LeftOutRecord, ...]:
    """What the best cut would have had besides, had nothing spoken against it; equal blocks together.

    Args:
        trace: one traced step.
        stages: that were found in it.
    """
    if not any(could_be_stage(call) and why_not_recomputable(call) for call in trace.calls):
        return ()
    groups: dict[tuple[str, str, str], list[Call]] = {}
    for call in (trace.calls[k] for k in best_cut(trace, could_be_stage)):
        if reason := why_not_recomputable(call):
            key = _class_of(call.module), reason + _where(trace, call), remedy_for(call)
            groups.setdefault(key, []).append(call)
    least_bytes = LEAST_SHARE * trace.storages.total_bytes(trace.saved(0, len(trace.saves)))
    records = [
        LeftOutRecord(
            names=tuple(stage_name(call) for call in sorted(calls, key=lambda call: call.first_op)),
            module_class=module_class,
            kept_bytes=_kept_bytes(trace, calls, stages),
            reason=reason,
            remedy=remedy,
        )
        for (module_class, reason, remedy), calls in groups.items()
    ]
    return tuple(record for record in records if record.kept_bytes >= max(1, least_bytes))


def _class_of(module: nn.Module) -> str:
    """The class by which a person knows the module, also where ``torch.jit`` has made another of it."""
    return getattr(module, "original_name", type(module).__name__)


def _kept_bytes(trace: Trace, calls: Iterable[Call], stages: Sequence[ChosenStage]) -> int:
    """What calls save for backward outside of stages, and what they hide, without their inputs."""
    spans = [(stage.call.first_save, stage.call.end_save) for stage in stages]
    kept: set[int] = set()
    for call in calls:
        kept |= call.hidden
        position = call.first_save
        for first, end in sorted(span for span in spans if call.first_save <= span[0] and span[1] <= call.end_save):
            kept |= trace.saved(position, first) - call.input_storages
            position = end
        kept |= trace.saved(position, call.end_save) - call.input_storages
    return trace.storages.total_bytes(kept)


def _where(trace: Trace, call: Call) -> str:
    """The module within a block that brings the reason in, where that is one of its parts; empty otherwise."""
    if not (call.side_effect or call.mutates_input):
        return ""
    reason = why_not_recomputable(call)
    inside = [(name, trace.calls[k]) for k, name in calls_inside(trace, call).items() if name]
    names = [name for name, inner in inside if why_not_recomputable(inner) == reason]
    return f", in its {names[-1]}" if names else ""
