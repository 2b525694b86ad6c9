"""Every distinct op of a graph measured for real, once: seconds, warm and repeated, and bytes beside what it makes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from profiler.capture.joint_graph import REMEDY, CaptureError, JointGraph, module_of, storages_of
from profiler.capture.step_dataflow import library_of, second_call
from profiler.measurement.meter import Mark, MarkedPhases, Meter, Place, memory_meter, time_meter
from profiler.workload.storages import allocated_bytes

REPEATS = 5
_PREPARED = Mark("forward")


class OpCost(NamedTuple):
    """What one run of an op costs.

    Attributes:
        seconds: the median of several.
        transient_bytes: the most that it holds beside what it reads and makes.
        made_bytes: of the storages that it makes, which may be larger than what is seen of them.
        repeatable: a second run makes the same; taken for granted of torch's own ops.
    """

    seconds: float
    transient_bytes: int
    made_bytes: tuple[int, ...]
    repeatable: bool = True


class OpKey(NamedTuple):
    """What ops have in common that cost the same: the function, and what it is called with, tensors by their shape."""

    target: Any
    arguments: str


def key_of(op: fx.Node) -> OpKey:
    """The key of an op."""
    return OpKey(op.target, repr(fx.map_arg((op.args, op.kwargs), _described)))


def costs_of(graph: JointGraph, ops: Iterable[fx.Node], device: torch.device) -> dict[fx.Node, OpCost]:
    """What each op costs; ops that are alike are measured once.

    Args:
        graph: that they are of.
        ops: nodes of it.
        device: of the step.
    """
    alike: dict[OpKey, list[fx.Node]] = {}
    for op in ops:
        alike.setdefault(key_of(op), []).append(op)
    firsts = [each[0] for each in alike.values()]
    seconds = _seconds(graph, firsts, device)
    other = [op for op in firsts if library_of(op) not in ("aten", "prims")]
    repeatable = {op: _makes_the_same(_with_tensors(graph, _first_call(op))) for op in other}
    held = _bytes(graph, firsts, device)
    return {
        op: OpCost(seconds[first], *held[first], repeatable.get(first, True))
        for first, each in zip(firsts, alike.values(), strict=True)
        for op in each
    }


class _Call(NamedTuple):
    """A call of an op's function, or of what its second run calls."""

    op: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _seconds(graph: JointGraph, ops: Iterable[fx.Node], device: torch.device) -> dict[fx.Node, float]:
    seconds: dict[fx.Node, float] = {}
    for op in ops:
        call = _with_tensors(graph, _first_call(op))
        _run(call)
        phases = _metered(time_meter(device), [call] * REPEATS, lambda call: call)
        seconds[op] = statistics.median(phase.seconds for mark, phase in phases if mark != _PREPARED)
    return seconds


def _bytes(
    graph: JointGraph, ops: Iterable[fx.Node], device: torch.device
) -> dict[fx.Node, tuple[int, tuple[int, ...]]]:
    """The most that an op's first run holds beside what it makes, or its second; and what it makes."""
    calls = [call for op in ops for call in _distinct(_first_call(op), _Call(op, *second_call(op)))]
    made: list[tuple[int, ...]] = []
    phases = _metered(
        memory_meter(device, 0),
        calls,
        lambda call: _with_tensors(graph, call),
        lambda call, result: made.append(_made_bytes(call.op, result)),
    )
    ran = {mark.place.index: phase for mark, phase in phases if mark.place is not None}
    held: dict[fx.Node, tuple[int, tuple[int, ...]]] = {}
    for number, call in enumerate(calls):
        transient_bytes, made_bytes = held.get(call.op, (0, made[number]))
        beside = ran[number].peak_bytes - ran[number].start_bytes - sum(made_bytes)
        held[call.op] = max(transient_bytes, beside), made_bytes
    return held


def _makes_the_same(call: _Call) -> bool:
    """Whether two runs of a call do; of one that draws random numbers they do not."""
    first, second = ([leaf for leaf in pytree.tree_leaves(_run(call)) if isinstance(leaf, Tensor)] for _ in range(2))
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


def _first_call(op: fx.Node) -> _Call:
    return _Call(op, op.target, op.args, op.kwargs)


def _distinct(first: _Call, second: _Call) -> list[_Call]:
    return [first] if second.target is first.target else [first, second]


def _metered(
    meter: Meter,
    calls: Iterable[_Call],
    prepared: Callable[[_Call], _Call],
    on_result: Callable[[_Call, Any], object] = lambda call, result: None,
) -> MarkedPhases:
    meter.start(_PREPARED)
    for number, call in enumerate(calls):
        ready = prepared(call)
        meter.mark(Mark("forward", Place("stage", number)))
        result = _run(ready)
        meter.mark(_PREPARED)
        on_result(call, result)
        del result, ready
    return meter.stop()


def _run(call: _Call) -> Any:
    try:
        with torch.no_grad():
            return call.target(*call.args, **call.kwargs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # Of values that it needs, or of types that tracing had wrong.
        module = module_of(call.op)
        raise CaptureError(
            f"profile: expected ops that can be measured by themselves, got {call.target}"
            f"{module and f' in {module}'}, which says {error}; {REMEDY}"
        ) from error


def _made_bytes(op: fx.Node, result: Any) -> tuple[int, ...]:
    """Of the storages that an op makes, in order: as traced, or as large as they are."""
    read = {storage for source in op.all_input_nodes for storage in storages_of(source)}
    made = {storage: size for storage, size in storages_of(op).items() if storage not in read}
    for traced, real in zip(pytree.tree_leaves(op.meta["val"]), pytree.tree_leaves(result), strict=False):
        if isinstance(traced, Tensor) and isinstance(real, Tensor):
            storage = traced.untyped_storage()._cdata
            if storage in made:
                made[storage] = max(made[storage], allocated_bytes(real.untyped_storage()))
    return tuple(made.values())


def _with_tensors(graph: JointGraph, call: _Call) -> _Call:
    """With tensors of the same shapes, types and strides, and values between 0 and 1; whole numbers are zeros."""
    made: dict[fx.Node, Any] = {}

    def given(node: fx.Node) -> Any:
        if node not in made:
            if node.op == "get_attr":
                made[node] = getattr(graph.module, str(node.target))
            else:
                made[node] = pytree.tree_map(_like, node.meta["val"])
        return made[node]

    args, kwargs = fx.map_arg((call.args, call.kwargs), given)
    return call._replace(args=args, kwargs=kwargs)


def _like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return made.uniform_() if 0 not in value.stride() else made.fill_(0.5)  # Both may be probabilities.
    return made.zero_()


def _described(node: fx.Node) -> Any:
    if node.op == "get_attr":
        return node.target
    return pytree.tree_map(_shape_of, node.meta["val"])


def _shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), str(value.device), tuple(value.shape), tuple(value.stride())
    return value
