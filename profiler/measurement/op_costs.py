"""Every distinct op of a graph measured for real, once: seconds, warm and repeated, and bytes beside what it makes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from profiler.capture.joint_graph import (
    CaptureError,
    JointGraph,
    library_of,
    module_of,
    second_call,
    step_graph_of,
    storages_of,
)
from profiler.measurement.meter import Mark, MarkedPhases, Meter, Place, memory_meter, time_meter
from profiler.step_graph import StepGraph, StepOp, StepStorage

REPEATS = 5
DIFFERS = "a second run of it on the same tensors made something else"
_PREPARED = Mark("forward")
# Host code of these reads where random numbers begin: their forward gives it as CPU tensors (outside of CUDA graphs),
# whatever tracing says, and on the device it would end the process. Flash attention's are on the device.
_READ_BY_HOST = frozenset({"philox_seed", "philox_offset"})
_HOST_READERS = frozenset(
    {"aten::_efficient_attention_backward", "aten::_scaled_dot_product_efficient_attention_backward"}
)


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
    """What ops have in common that cost the same: the function, and what it is called with, tensors by their layout."""

    target: Any
    arguments: str


def measured_graph(graph: JointGraph, device: torch.device) -> StepGraph:
    """The dataflow of a step with what its ops cost on the device that runs it."""
    costs = {op.name: cost for op, cost in costs_of(graph, dict.fromkeys(graph.makers.values()), device).items()}
    step = step_graph_of(graph)
    made = {number: n for op in step.ops for number, n in zip(op.makes, costs[op.name].made_bytes, strict=True)}
    return replace(
        step,
        ops=tuple(_with_cost(op, costs[op.name]) for op in step.ops),
        storages=tuple(_as_made(each, made.get(number, 0)) for number, each in enumerate(step.storages)),
    )


def _as_made(storage: StepStorage, made_bytes: int) -> StepStorage:
    """A traced storage with the bytes that its op was seen to make, if they are more."""
    size_bytes = max(made_bytes, storage.size_bytes)
    return replace(storage, size_bytes=size_bytes, unseen_bytes=size_bytes - storage.size_bytes)


def _with_cost(op: StepOp, cost: OpCost) -> StepOp:
    once_reason = op.once_reason or ("" if cost.repeatable else DIFFERS)
    return replace(op, seconds=cost.seconds, transient_bytes=cost.transient_bytes, once_reason=once_reason)


class StorageSizes:
    """Bytes of the storages under what is traced: those that tracing shows, or more where an op made them larger."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}

    def of(self, tensor: Tensor) -> int:
        """Of the storage under a traced tensor."""
        storage = tensor.untyped_storage()
        return max(storage.nbytes(), self._made.get(storage._cdata, 0))

    def add(self, made: Mapping[int, int]) -> None:
        """An op has made storages of so many bytes."""
        self._made.update(made)

    def key_of(self, op: fx.Node) -> OpKey:
        """The key of an op."""
        return OpKey(op.target, repr(fx.map_arg((op.args, op.kwargs), self._described)))

    def _described(self, node: fx.Node) -> Any:
        return node.target if node.op == "get_attr" else pytree.tree_map(self._layout, node.meta["val"])

    def _layout(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape, stride = tuple(value.shape), tuple(value.stride())
        return str(value.dtype), str(value.device), shape, stride, value.storage_offset(), self.of(value)


def costs_of(graph: JointGraph, ops: Iterable[fx.Node], device: torch.device) -> dict[fx.Node, OpCost]:
    """What each op costs; ops that are alike are measured once.

    Args:
        graph: that they are of.
        ops: nodes of it, in their order.
        device: of the step.
    """
    sizes = StorageSizes()
    held, alike = _bytes(graph, ops, device, sizes)
    seconds = _seconds(graph, alike, device, sizes)
    other = [op for op in alike if library_of(op) not in ("aten", "prims")]
    repeatable = {op: _makes_the_same(_with_tensors(graph, _first_call(op), sizes)) for op in other}
    return {
        op: OpCost(seconds[first], *held[first], repeatable.get(first, True))
        for first, each in alike.items()
        for op in each
    }


class _Call(NamedTuple):
    """A call of an op's function, or of what its second run calls."""

    op: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def _seconds(
    graph: JointGraph, ops: Iterable[fx.Node], device: torch.device, sizes: StorageSizes
) -> dict[fx.Node, float]:
    seconds: dict[fx.Node, float] = {}
    for op in ops:
        call = _with_tensors(graph, _first_call(op), sizes)
        _run(call)
        phases = _metered(time_meter(device), [call] * REPEATS, lambda call: call)
        seconds[op] = statistics.median(phase.seconds for mark, phase in phases if mark != _PREPARED)
    return seconds


def _bytes(
    graph: JointGraph, ops: Iterable[fx.Node], device: torch.device, sizes: StorageSizes
) -> tuple[dict[fx.Node, tuple[int, tuple[int, ...]]], dict[fx.Node, list[fx.Node]]]:
    """The most that an op's first run holds beside what it makes, or its second; and what it makes.

    Ops that are alike run once: the second dict has them by the first of them. ``sizes`` gets to know what ops make.
    """
    firsts: dict[OpKey, fx.Node] = {}
    alike: dict[fx.Node, list[fx.Node]] = {}
    calls: list[_Call] = []
    made: dict[fx.Node, tuple[int, ...]] = {}

    def distinct_calls() -> Iterator[_Call]:
        for op in ops:
            first = firsts.setdefault(sizes.key_of(op), op)
            alike.setdefault(first, []).append(op)
            for call in _distinct(_first_call(op), _Call(op, *second_call(op))) if first is op else ():
                calls.append(call)
                yield call
            sizes.add(dict(zip(_made_by(op), made[first], strict=True)))

    phases = _metered(
        memory_meter(device, 0),
        distinct_calls(),
        lambda call: _with_tensors(graph, call, sizes),
        lambda call, result: made.setdefault(call.op, _made_bytes(call.op, result)),
    )
    ran = {mark.place.index: phase for mark, phase in phases if mark.place is not None}
    held: dict[fx.Node, tuple[int, tuple[int, ...]]] = {}
    for number, call in enumerate(calls):
        beside = ran[number].peak_bytes - ran[number].start_bytes - sum(made[call.op])
        held[call.op] = max(held.get(call.op, (0, ()))[0], beside), made[call.op]
    return held, alike


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
            f"{module and f' in {module}'}, which says {error}"
        ) from error


def _made_by(op: fx.Node) -> dict[int, int]:
    """Numbers and traced bytes of the storages that an op makes, in their order."""
    read = {storage for source in op.all_input_nodes for storage in storages_of(source)}
    return {storage: size for storage, size in storages_of(op).items() if storage not in read}


def _made_bytes(op: fx.Node, result: Any) -> tuple[int, ...]:
    """Of the storages that an op makes, in order: as traced, or as large as they are."""
    made = _made_by(op)
    for traced, real in zip(pytree.tree_leaves(op.meta["val"]), pytree.tree_leaves(result), strict=False):
        if isinstance(traced, Tensor) and isinstance(real, Tensor):
            storage = traced.untyped_storage()._cdata
            if storage in made:
                made[storage] = max(made[storage], real.untyped_storage().nbytes())
    return tuple(made.values())


def _with_tensors(graph: JointGraph, call: _Call, sizes: StorageSizes) -> _Call:
    """With tensors of the same layouts and types, and values between 0 and 1; whole numbers are zeros.

    Their storages are as large as those in the step: some ops copy all that lies under a view.
    """
    made: dict[fx.Node, Any] = {}

    def given(node: fx.Node) -> Any:
        if node not in made:
            if node.op == "get_attr":
                made[node] = getattr(graph.module, str(node.target))
            else:
                made[node] = pytree.tree_map(lambda value: _like(value, sizes), node.meta["val"])
        return made[node]

    args, kwargs = with_host_arguments(call.target, *fx.map_arg((call.args, call.kwargs), given))
    return call._replace(args=args, kwargs=kwargs)


def with_host_arguments(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments of an op with zeros on the CPU for the tensors that its host code reads."""
    if not isinstance(op, torch._ops.OpOverload) or op._schema.name not in _HOST_READERS:
        return args, kwargs
    names = [argument.name for argument in op._schema.arguments]
    return (
        tuple(_on_host(name, value) for name, value in zip(names, args, strict=False)),
        {name: _on_host(name, value) for name, value in kwargs.items()},
    )


def _on_host(name: str, value: Any) -> Any:
    if name not in _READ_BY_HOST or not isinstance(value, Tensor):
        return value
    return torch.zeros_like(value, device="cpu")


def _like(value: Any, sizes: StorageSizes) -> Any:
    if not isinstance(value, Tensor):
        return value
    storage = torch.empty(sizes.of(value), dtype=torch.uint8, device=value.device).untyped_storage()
    made = torch.empty(0, dtype=value.dtype, device=value.device)
    made.set_(storage, value.storage_offset(), value.shape, value.stride())
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return made.uniform_() if 0 not in value.stride() else made.fill_(0.5)  # Both may be probabilities.
    return made.zero_()
