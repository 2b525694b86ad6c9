"""The trace of a compiled step: what goes into its stages, comes out and is saved once they are compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from profiler.trace.step_trace import Call, Op, Recorder, Trace
from profiler.workload.forward_patches import ForwardPatches
from profiler.workload.workload import Workload


def trace_compiled(workload: Workload, trace: Trace, calls: Sequence[Call]) -> tuple[Trace, list[Call]]:
    """Run one step again, compiled this time, and record some of its calls as they are then.

    Compiled code shows no ops: those of ``trace`` stay, and the new calls stand
    where the old ones stood among them.

    Args:
        workload: its model is compiled, or something in it.
        trace: of the same step, uncompiled.
        calls: those to record; none inside of another.

    Raises:
        ValueError: the compiled step does not make such a call.
    """
    recorder = Recorder(workload, trace.storages)
    patches = ForwardPatches()
    try:
        for name, module in {id(call.module): (call.name, call.module) for call in calls}.values():
            patches.wrap(module, lambda forward, n=name, m=module: recorder.recorded(forward, n, m))
        workload.zero_grad()
        with recorder.saving():
            loss = workload.forward()
        recorder.begin_backward()
        loss.backward()
        del loss
    finally:
        patches.remove()
        workload.zero_grad()
    compiled = recorder.finish()
    found = {(id(call.module), call.index): call for call in compiled.calls}
    placed = [_placed(found, old, compiled) for old in calls]
    compiled.ops = _with_births(trace, placed)
    compiled.backward_ops = trace.backward_ops
    return compiled, placed


def _placed(found: dict[tuple[int, int], Call], old: Call, compiled: Trace) -> Call:
    call = found.get((id(old.module), old.index))
    if call is None:
        raise ValueError(f"expected the compiled step to call {old.name!r} {old.index + 1} times, got fewer calls")
    call.first_op, call.end_op = old.first_op, old.end_op
    for save in compiled.saves[call.first_save : call.end_save]:
        save.op = old.end_op  # A compiled forward saves at its end.
    return call


def _with_births(trace: Trace, calls: Iterable[Call]) -> list[Op]:
    """The ops, and at which of them the storages of compiled calls are made: inside a call, or just before it."""
    ops = list(trace.ops)
    known = set(trace.always_alive)
    for call in calls:
        for leaves, position in ((call.inputs, call.first_op - 1), (call.outputs, call.end_op - 1)):
            new = {leaf.storage for leaf in leaves if leaf.storage is not None} - known
            if new and position >= 0:
                ops[position] = replace(ops[position], storages=(*ops[position].storages, *sorted(new)))
            known |= new
    return ops
