"""Stages whose calls are captured as graphs of ops: checked against the stages themselves, and costed op by op.

Every distinct op of a graph is measured for real, once: seconds, warm and repeated, and bytes beside what it makes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from profiler.agreement import agreed, first_failure, gathered
from profiler.measurement.device_memory import ran_out
from profiler.measurement.meter import Mark, MarkedPhases, Meter, Place, memory_meter, time_meter
from profiler.measurement.stage_probe import FirstRun
from profiler.recomputation.saved_tensors import PLAIN_OR_FAKE
from profiler.step_graph import StepGraph, StepOp, StepRuns, StepStorage
from profiler.trace.call_program import BoundProgram, CallProgram
from profiler.trace.captured_call import CapturedCall, GradientLayouts
from profiler.trace.captures import CallGuard, captured, difference, differing_attributes
from profiler.trace.dropout_masks import OWN_LIBRARY
from profiler.trace.joint_graph import (
    CaptureError,
    JointGraph,
    library_of,
    module_of,
    second_call,
    step_graph_of,
    storages_of,
)
from profiler.trace.partition import HOOKS_OF_CALLS, ChosenStage, why_not_recomputable
from profiler.trace.programs import order_of
from profiler.trace.step_record import Call, Trace
from profiler.workload.data_parallel import casts_as_unit
from profiler.workload.tensor_trees import in_new_containers, tensors_in

ProposeRuns = Callable[[StepGraph], Sequence[StepRuns]]
_OTHER_GRAPH = "stages like it are captured as another graph"


@dataclass(slots=True)
class CapturedKind:
    """Stages of one kind, captured.

    Attributes:
        graph: the graph of their ops, with costs; None where they are opaque.
        opaque: why they are; empty otherwise.
        other_bits: the results that their programs round otherwise than the stages do, in words; empty for none.
        unread: attributes in which the stages' modules differ, and which make no difference to what they compute.
        once: the program in which each op runs once, by stage.
        orders: the orders of the graph's ops that are worth having; None until they are asked for.
    """

    graph: StepGraph | None = None
    opaque: str = ""
    other_bits: str = ""
    unread: frozenset[str] = frozenset()
    once: dict[int, BoundProgram] = field(default_factory=dict)
    orders: Sequence[StepRuns] | None = None
    _guards: dict[int, CallGuard] = field(default_factory=dict)

    def run(self, k: int, args: Any, kwargs: Any) -> Any:
        """Call a stage as that program, and ask its guard before, as it is called where a plan is applied."""
        program, guard = self.once[k], self._guards.get(k)
        if guard is None or guard.refusal(args, kwargs):  # Under the memory meter modules hold something else.
            self._guards[k] = CallGuard(program.module, args, kwargs)
        return program(*args, **kwargs)


class KindCapture:
    """Captures the stages of one kind, one after the other.

    Args:
        stages: the stages of the step.
        trace: the trace of the step that they were chosen from.
        model: the model of their modules.
        device: of the step.
        gradient_strides: the strides of the gradients of the stages' outputs.
    """

    def __init__(
        self,
        stages: Sequence[ChosenStage],
        trace: Trace,
        model: nn.Module,
        device: torch.device,
        gradient_strides: Mapping[int, Sequence[tuple[int, ...]]],
    ) -> None:
        self._stages, self._trace, self._model, self._device = stages, trace, model, device
        self._gradient_strides = {k: tuple(each) for k, each in gradient_strides.items()}
        self._kind = CapturedKind()
        self._programs: list[tuple[CallProgram, nn.Module, int]] = []
        self._failure = ""
        self._raised: Exception | None = None

    def add(self, k: int, first: FirstRun) -> None:
        """Capture stage k, or find that a program of one before it gives its own bits; once one is opaque, all are.

        Args:
            k: position of the stage.
            first: its call, with the arguments.
        """
        if self._failure:
            return
        try:
            self._failure = self._obstacle(k, first) or self._capture(k, first)
        except Exception as error:  # noqa: BLE001 - the stage's own code runs here, and torch's tracing.
            self._failure, self._raised = f"capturing it fails: {type(error).__name__}: {_first_line(error)}", error
            if isinstance(error, CaptureError):
                self._failure = str(error)
            elif ran_out(error):
                self._failure = "there is no memory to check a program of it against the stage"

    def refuse(self, why: str) -> None:
        """The stages are opaque."""
        self._failure = self._failure or why

    def finished(self) -> CapturedKind:
        """Returns the verdict on the stages, once all of them were added; the same on all ranks."""
        kind, opaque = self._kind, first_failure(self._failure, self._raised)
        if not opaque:
            graph = agreed(kind.graph)
            other = _OTHER_GRAPH if _without_costs(graph) != _without_costs(kind.graph) else ""
            opaque = first_failure(other)
            kind.graph, kind.unread = graph, frozenset().union(*gathered(kind.unread))
        return kind if not opaque else CapturedKind(opaque=opaque)

    def _obstacle(self, k: int, first: FirstRun) -> str:
        """Returns the reason not to try to capture a stage; empty for none."""
        call = self._stages[k].call
        if reason := why_not_recomputable(call):
            return reason
        if call.distributed:
            return "its tensors are distributed (DTensor), or it calls collectives"
        for name, inner in call.module.named_modules():
            if name and any(getattr(inner, kind) for kind in HOOKS_OF_CALLS):
                return f"{name!r} inside it has hooks, which a program would not run"
        if first.state.casts() and self._shares_parameters(call):
            return (
                "autocast casts its parameters once for it and for other calls that use them, and adds up in the cast"
            )
        if first.state.units.inside:
            return "it has units of fully_shard inside"
        with first.state.units.gathered():
            if any(type(p) not in PLAIN_OR_FAKE for p in call.module.parameters()):
                return "its parameters are of a type of their own"
        if casts_as_unit(call.module, tensors_in(first.arguments)):
            return "as a unit of fully_shard it casts what it is given, or returns"
        return ""

    def _shares_parameters(self, call: Call) -> bool:
        """Whether anything outside of a call uses parameters of its module.

        That may be another call of the module or of a part of it, whether or not it is a stage; or another module.
        """
        inside, calls = {*call.module.modules()}, self._trace.calls
        for position, other in enumerate(calls):
            if other.module in inside and call not in (other, *(calls[k] for k in self._trace.ancestors(position))):
                return True
        mine = {id(p) for p in call.module.parameters()}
        others = _modules_outside(self._model, call.module)
        return any(id(p) in mine for other in others for p in other._parameters.values())

    def _capture(self, k: int, first: FirstRun) -> str:
        kind, module, strides = self._kind, self._stages[k].call.module, self._gradient_strides.get(k)
        known = [each for each in self._programs if self._gradient_strides.get(each[2]) == strides]
        shared = next((each for each in known if not self._difference(k, first, each[0])), None)
        if shared is None:
            call = self._captured(k, first)
            program = CallProgram(call, order_of(call.graph))
            if what := self._difference(k, first, program):
                if self._difference(k, first, program, rounded=True):
                    return f"a program of its ops gives other numbers than the stage: {what}"
                kind.other_bits = f"a program of its ops gives other bits than the stage: {what}"
            graph = call.with_arguments(step_graph_of(call.graph))
            if kind.graph is None:
                kind.graph = call.with_arguments(measured_graph(call.graph, self._device))
            elif graph != _without_costs(kind.graph):
                return _OTHER_GRAPH
            self._programs.append((program, module, k))
        else:
            program = shared[0]
            kind.unread |= differing_attributes(shared[1], module) or frozenset()
        kind.once[k] = program.bound(module)
        kind.once[k].watches_gradients = True
        return ""

    def _captured(self, k: int, first: FirstRun) -> CapturedCall:
        args, kwargs = in_new_containers(first.arguments)
        with first.state.reinstated():
            module, strides = self._stages[k].call.module, self._gradient_strides.get(k, ())
            return captured(self._model, module, first.call, args, kwargs, GradientLayouts(strides)).call

    def _difference(self, k: int, first: FirstRun, program: CallProgram, *, rounded: bool = False) -> str:
        """Returns how a program of a stage's ops differs from the stage, where two runs of the stage do not differ.

        ``rounded`` is as for ``difference``.
        """
        module = self._stages[k].call.module
        args, kwargs = in_new_containers(first.arguments)
        with first.state.reinstated():
            call = module, first.call, args, kwargs
            what = difference(program.bound(module), *call, rounded=rounded)
            if what and self._device.type != "cpu" and what == difference(first.call, *call, rounded=rounded):
                return ""
        return what


def _modules_outside(model: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that are there without this one, though some may be inside it as well."""
    waiting, seen = [model], {module}
    while waiting:
        other = waiting.pop()
        if other not in seen:
            seen.add(other)
            waiting += other.children()
            yield other


def _without_costs(graph: StepGraph | None) -> StepGraph | None:
    """Returns the graph without costs: the part that two graphs of the same ops have in common."""
    if graph is None:
        return None
    return replace(
        graph,
        ops=tuple(replace(op, seconds=0.0, transient_bytes=0, once_reason="") for op in graph.ops),
        storages=tuple(replace(s, size_bytes=s.traced_bytes, unseen_bytes=0) for s in graph.storages),
    )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


REPEATS = 5
DIFFERS = "a recomputation on the same tensors gave another result"
_PREPARED = Mark("forward")
# Host code of these reads where random numbers begin: their forward gives it as CPU tensors (outside of CUDA graphs),
# whatever tracing says, and on the device it would end the process. Flash attention's are on the device.
_READ_BY_HOST = frozenset({"philox_seed", "philox_offset"})
_HOST_READERS = frozenset(
    {"aten::_efficient_attention_backward", "aten::_scaled_dot_product_efficient_attention_backward"}
)


class OpCost(NamedTuple):
    """The cost of one run of an op.

    Attributes:
        seconds: the median of several.
        transient_bytes: the most that it holds beside what it reads and makes.
        made_bytes: the sizes of the storages that it makes, which may be larger than their tensors.
        repeatable: whether a recomputation has the same result; taken for granted for torch's own ops, and for ours.
    """

    seconds: float
    transient_bytes: int
    made_bytes: tuple[int, ...]
    repeatable: bool = True


class OpKey(NamedTuple):
    """The key of ops of equal cost: the function and its arguments, tensors by their layout."""

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
        """The bytes of the storage under a traced tensor."""
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
    """Returns the cost of each op; ops that are alike are measured once.

    Args:
        graph: the graph of the ops.
        ops: nodes of it, in their order.
        device: of the step.
    """
    sizes = StorageSizes()
    held, alike = _bytes(graph, ops, device, sizes)
    seconds = _seconds(graph, alike, device, sizes)
    other = [op for op in alike if library_of(op) not in ("aten", "prims", OWN_LIBRARY)]
    repeatable = {op: _makes_the_same(_with_tensors(graph, _first_call(op), sizes)) for op in other}
    return {
        op: OpCost(seconds[first], *held[first], repeatable.get(first, True))
        for first, each in alike.items()
        for op in each
    }


class _Call(NamedTuple):
    """A call of an op's function, or of the function that recomputes it."""

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
            f"profile: {call.target}{module and f' in {module}'} cannot be measured by itself: {error}"
        ) from error


def _made_by(op: fx.Node) -> dict[int, int]:
    """Numbers and traced bytes of the storages that an op makes, in their order."""
    read = {storage for source in op.all_input_nodes for storage in storages_of(source)}
    return {storage: size for storage, size in storages_of(op).items() if storage not in read}


def _made_bytes(op: fx.Node, result: Any) -> tuple[int, ...]:
    """Returns the sizes of the storages that an op makes, in order: as traced, or as large as they are."""
    made = _made_by(op)
    for traced, real in zip(pytree.tree_leaves(op.meta["val"]), pytree.tree_leaves(result), strict=False):
        if isinstance(traced, Tensor) and isinstance(real, Tensor):
            storage = traced.untyped_storage()._cdata
            if storage in made:
                made[storage] = max(made[storage], real.untyped_storage().nbytes())
    return tuple(made.values())


def _with_tensors(graph: JointGraph, call: _Call, sizes: StorageSizes) -> _Call:
    """Returns arguments with tensors of the same layouts and types, and values between 0 and 1; integers are zeros.

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
    whole = torch.empty(-(-sizes.of(value) // value.dtype.itemsize), dtype=value.dtype, device=value.device)
    made = whole.as_strided(value.shape, value.stride(), value.storage_offset())
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return made.uniform_() if 0 not in value.stride() else made.fill_(0.5)  # Both may be probabilities.
    return made.zero_()
