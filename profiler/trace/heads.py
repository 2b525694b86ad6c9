"""Finds the head of a model: its last layer, where what it returns is large and each row of it stands for itself."""

from __future__ import annotations

from collections.abc import Iterator

from profiler.pieces.heads import rows_at_once
from profiler.records import HeadRecord
from profiler.trace.step_record import Call, Leaf, Trace

_LARGER = 2  # times its input, below which a piece would save little


def heads_of(trace: Trace, device_type: str) -> tuple[HeadRecord, ...]:
    """The last call of a module with parameters, and those that do nothing but pass it on, the innermost first."""
    return tuple(_records(trace, device_type))


def _records(trace: Trace, device_type: str) -> Iterator[HeadRecord]:
    last = _last_layer(trace)
    if last is None:
        return
    classes = trace.calls[last].outputs[-1].shape[-1:] if trace.calls[last].outputs else ()
    for position in (last, *trace.ancestors(last)):
        call = trace.calls[position]
        rows = _rows(call)
        once = sum(other.module is call.module for other in trace.calls) == 1
        if not rows or call.parent < 0 or not once or call.outputs[0].shape[-1:] != classes:
            continue
        large = call.outputs[0].shape[-1] >= _LARGER * call.inputs[0].shape[-1]
        if rows > rows_at_once(device_type) and large:
            number = call.outputs[0].storage
            yield HeadRecord(
                name=call.name, rows=rows, output_bytes=0 if number is None else trace.storages.bytes_of[number]
            )


def _last_layer(trace: Trace) -> int | None:
    """Position of the innermost call of a module with parameters that begins last."""
    with_parameters = [k for k, call in enumerate(trace.calls) if next(call.module.parameters(), None) is not None]
    around = {trace.calls[k].parent for k in with_parameters}
    return max((k for k in with_parameters if k not in around), default=None)


def _rows(call: Call) -> int:
    """How many rows a call takes and gives, each by itself as far as shapes show; 0 where it does not."""
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return 0
    (given,), (made,) = call.inputs, call.outputs
    if not (_is_floating(given) and _is_floating(made)) or given.shape[:-1] != made.shape[:-1]:
        return 0
    count = 1
    for size in given.shape[:-1]:
        count *= size
    return count if len(given.shape) > 1 else 0


def _is_floating(leaf: Leaf) -> bool:
    return "float" in leaf.dtype
