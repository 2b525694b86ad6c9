"""Finds parts that may run a few rows at a time: the head of a model, and modules that keep much, row by row.

The head is the last layer, where its output is large and each row of it stands for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from profiler.agreement import agreed
from profiler.recomputation.heads import rows_at_once
from profiler.recomputation.steps_in_pieces import relative_difference
from profiler.records import HeadRecord, ModulePieces
from profiler.trace.partition import why_not_recomputable
from profiler.trace.step_record import Call, Leaf, Trace
from profiler.trace.step_trace import trace_step
from profiler.workload.compiled_forwards import Forward
from profiler.workload.forward_patches import ForwardPatches
from profiler.workload.random_states import RandomState
from profiler.workload.snapshot import preserved
from profiler.workload.tensor_trees import tensors_in, with_tensors, without_tensors
from profiler.workload.workload import Workload

_LARGER = 2  # times its input, below which a piece would save little


def heads_of(trace: Trace, device: torch.device) -> tuple[HeadRecord, ...]:
    """The last call of a module with parameters, and those that do nothing but pass it on, the innermost first."""
    return tuple(_records(trace, device))


def _records(trace: Trace, device: torch.device) -> Iterator[HeadRecord]:
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
        if rows > rows_at_once(device) and large:
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


COUNTS = (2, 8)  # of pieces: few run faster; more than these would save little, and run smaller kernels
_SHARE = 0.25  # of the most that a module keeps, from which one is taken apart
_ROUNDING = 128  # times the rounding of one number, that results may differ by


def divisible_modules(workload: Workload, head: str = "") -> tuple[tuple[ModulePieces, ...], tuple[ModulePieces, ...]]:
    """Modules that can be taken apart along batch or tokens: those inside the model that keep most, and the model.

    Runs two steps; the workload is left as it was.

    Args:
        workload: the training step.
        head: name of a module that runs in pieces with its loss; empty for none. What it is a part of stays whole, but
            for the model.

    Returns:
        Modules inside that may run in pieces together; and the model, where its call may. In two pieces each.
    """
    randomness = RandomState()
    with preserved(workload):
        trace = trace_step(workload)
    likely = [k for k, call in enumerate(trace.calls) if _may_be_taken_apart(trace, call)]
    checks = _Checks()
    patches = ForwardPatches(counts=False)
    try:
        for k in likely:
            call = trace.calls[k]
            patches.wrap(call.module, lambda forward, n=call.name: checks.wrapped(forward, n))
        with preserved(workload):
            randomness.restore()
            workload.step(until="optimizer" if workload.custom_step is None else None)
    finally:
        patches.remove()
    chosen = [k for k in likely if trace.calls[k].name in checks.dims]
    of_head = {k for k, call in enumerate(trace.calls) if head and call.name == head}
    around = of_head.union(*(trace.ancestors(k) for k in of_head))
    inside = {k for k in chosen if trace.calls[k].parent >= 0 and k not in around}
    outermost = [k for k in inside if inside.isdisjoint(trace.ancestors(k))]
    kept = {k: _kept_bytes(trace, trace.calls[k]) for k in outermost}
    most = max(kept.values(), default=0)
    large = [k for k in sorted(outermost) if kept[k] >= _SHARE * most]
    whole = [k for k in chosen if trace.calls[k].parent < 0]

    def pieces(k: int) -> ModulePieces:
        name = trace.calls[k].name
        return ModulePieces(name=name, dim=checks.dims[name], count=COUNTS[0])

    return agreed((tuple(map(pieces, large)), tuple(map(pieces, whole))))


def _may_be_taken_apart(trace: Trace, call: Call) -> bool:
    once = sum(other.module is call.module for other in trace.calls) == 1
    quiet = not (call.draws_random or call.mutated_buffers or call.distributed or why_not_recomputable(call))
    one_result = len(call.outputs) == 1 and "float" in call.outputs[0].dtype and len(call.outputs[0].shape) > 1
    return once and quiet and one_result and _kept_bytes(trace, call) > 0


def _kept_bytes(trace: Trace, call: Call) -> int:
    """Returns the bytes that it keeps for backward beside its inputs and outputs."""
    return trace.storages.total_bytes(
        trace.saved(call.first_save, call.end_save) - call.input_storages - call.output_storages
    )


class _Checks:
    """Holds what modules give in two pieces against what they give at once.

    Attributes:
        dims: the dimension along which a module can be taken apart, by its name.
    """

    def __init__(self) -> None:
        self.dims: dict[str, int] = {}

    def wrapped(self, forward: Forward, name: str) -> Forward:
        """Returns the function that runs in place of a module's forward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if torch.is_grad_enabled() and isinstance(output, Tensor):
                with torch.no_grad():
                    for dim in _dims(output):
                        if _is_same(output, _in_two(forward, args, kwargs, output, dim)):
                            self.dims[name] = dim
                            break
            return output

        return run


def _dims(output: Tensor) -> Iterator[int]:
    """Tokens first: there are more of them."""
    yield from (dim for dim in (1, 0) if output.shape[dim] > 1 and (dim == 0 or output.dim() == 3))


def _in_two(forward: Forward, args: Any, kwargs: Any, output: Tensor, dim: int) -> Tensor | None:
    given, tree = tensors_in((args, kwargs)), without_tensors((args, kwargs))
    size = output.shape[dim]
    first = next((t for t in given if t.is_floating_point() and t.dim() > dim), None)
    if first is None or first.shape[dim] != size:
        return None
    made = []
    for begin, length in ((0, size // 3 + 1), (size // 3 + 1, size - size // 3 - 1)):
        parts = [t.narrow(dim, begin, length) if t.dim() > dim and t.shape[dim] == size else t for t in given]
        piece_args, piece_kwargs = with_tensors(tree, parts)
        try:
            piece = forward(*piece_args, **piece_kwargs)
        except Exception:  # noqa: BLE001 - the user's code, which need not take other shapes
            return None
        if not isinstance(piece, Tensor):
            return None
        made.append(piece)
    return torch.cat(made, dim)


def _is_same(output: Tensor, apart: Tensor | None) -> bool:
    if apart is None or apart.shape != output.shape or apart.dtype != output.dtype:
        return False
    eps = torch.finfo(output.dtype).eps
    return relative_difference(apart, output) <= min(_ROUNDING * eps, eps**0.5)
