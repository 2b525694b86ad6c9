"""The trace of a compiled step: what goes into its stages, comes out of them and is saved once they are compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from profiler.trace.step_record import Call, Op, Trace
from profiler.trace.step_trace import StepRecorder
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
    modules = {id(call.module): (call.name, call.module) for call in calls}.values()
    compiled = StepRecorder(workload, trace.storages).record_step(modules, nullcontext())
    compiled_calls = [_compiled_call(compiled, call) for call in calls]
    compiled.ops = _with_stage_storages(trace, compiled_calls)
    compiled.backward_ops = trace.backward_ops
    return compiled, compiled_calls


def _compiled_call(compiled: Trace, old: Call) -> Call:
    """The call in the compiled step that is ``old`` in the uncompiled one, at the place of that among its ops."""
    key = id(old.module), old.index
    call = next((call for call in compiled.calls if (id(call.module), call.index) == key), None)
    if call is None:
        raise ValueError(f"expected the compiled step to call {old.name!r} {old.index + 1} times, got fewer calls")
    call.first_op, call.end_op = old.first_op, old.end_op
    for save in compiled.saves[call.first_save : call.end_save]:
        save.op = old.end_op  # A compiled forward saves at its end.
    return call


def _with_stage_storages(trace: Trace, calls: Iterable[Call]) -> list[Op]:
    """The ops, with the storages that compiled calls take or return: made inside the call, or just before it."""
    ops = list(trace.ops)
    known = set(trace.always_alive)
    for call in calls:
        for storages, position in ((call.input_storages, call.first_op - 1), (call.output_storages, call.end_op - 1)):
            new = storages - known
            if new and position >= 0:
                ops[position] = replace(ops[position], storages=(*ops[position].storages, *sorted(new)))
            known |= new
    return ops
