"""From a joint graph to plain data: storages for tensors, ops without views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from profiler.capture.joint_graph import JointGraph, module_of, storages_of
from profiler.capture.random_ops import draws, state_bytes
from profiler.step_graph import StepGraph, StepOp, StepStorage

STATISTICS = (3, 4)  # of a batch norm's arguments and results: running ones, which its first run alone makes
CHANGES = "it reads a buffer that the step changes"
COLLECTIVE = "it is a collective, which every rank would have to run again"
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")


def step_graph_of(graph: JointGraph) -> StepGraph:
    """The dataflow of the step, without seconds."""
    makers, of_loss = graph.makers, _sizes(graph.tangents)  # in order, the same in every process
    numbers = {storage: number for number, storage in enumerate((*makers, *of_loss))}
    makes: dict[fx.Node, list[int]] = {}
    for storage, op in makers.items():
        makes.setdefault(op, []).append(numbers[storage])
    changed = _storages(graph.changed_inputs)
    ops: list[StepOp] = []
    for op in filter(makes.__contains__, graph.ops):
        read = _storages(op.all_input_nodes)
        ops.append(
            StepOp(
                name=op.name,
                op=str(op.target),
                module=module_of(op),
                side="forward" if op in graph.forward_ops else "backward",
                reads=tuple(sorted(numbers[storage] for storage in read if storage in numbers)),
                makes=tuple(makes[op]),
                once_makes=_statistics(op, numbers),
                random=draws(op),
                state_bytes=state_bytes(op) if draws(op) else 0,
                once_reason=_once_reason(op, reads_changed=not changed.isdisjoint(read)),
            )
        )
    returned, written = _storages(graph.returned), _storages(graph.written)
    gradients = _storages(graph.outputs[graph.forward_outputs :])
    sizes = _sizes((*graph.inputs, *graph.constants, *graph.tangents, *graph.ops))
    return StepGraph(
        ops=tuple(ops),
        storages=tuple(
            StepStorage(
                size_bytes=sizes[storage],
                returned=storage in returned,
                written=storage in written,
                gradient=storage in gradients,
                of_loss=storage in of_loss,
            )
            for storage in numbers
        ),
        resident_bytes=sum(_sizes((*graph.inputs, *graph.constants)).values()),
    )


def _once_reason(op: fx.Node, *, reads_changed: bool) -> str:
    if library_of(op) in _COLLECTIVES:
        return COLLECTIVE
    return CHANGES if reads_changed and not is_batch_norm(op) else ""


def library_of(op: fx.Node) -> str:
    """The library of an op: ``aten`` for torch's own; empty for calls that are none."""
    return op.target.namespace if isinstance(op.target, torch._ops.OpOverload) else ""


def _statistics(op: fx.Node, numbers: Mapping[int, int]) -> tuple[int, ...]:
    if not is_batch_norm(op):
        return ()
    made = [op.meta["val"][place].untyped_storage()._cdata for place in STATISTICS]
    return tuple(numbers[storage] for storage in made)


def is_batch_norm(op: fx.Node) -> bool:
    """Whether an op normalizes by its batch, and makes running statistics beside, which no second run needs."""
    batch_norm = op.target is torch.ops.aten._native_batch_norm_legit_functional.default and op.args[5] is True
    return batch_norm and _saves_without_statistics(op)


def _saves_without_statistics(norm: fx.Node) -> bool:
    """Whether a run without running statistics saves the same: on the CPU, what has another type sets the type."""
    source, weight, bias = norm.args[:3]
    saved = norm.meta["val"][1]
    same_type = isinstance(source, fx.Node) and source.meta["val"].dtype == saved.dtype
    return same_type or saved.device.type != "cpu" or weight is not None or bias is not None


def second_call(op: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a second run of an op calls: a batch norm neither reads nor makes statistics, which have changed meanwhile.

    Returns:
        The function, its positional and its named arguments.
    """
    if not is_batch_norm(op):
        return op.target, op.args, op.kwargs
    kept = tuple(each for k, each in enumerate(op.args) if k not in STATISTICS)
    return torch.ops.aten._native_batch_norm_legit.no_stats, kept, {}


def _sizes(nodes: Iterable[Any]) -> dict[int, int]:
    return {storage: size for node in nodes for storage, size in storages_of(node).items()}


def _storages(nodes: Iterable[Any]) -> set[int]:
    return set(_sizes(nodes))
