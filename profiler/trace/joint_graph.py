"""Forward and backward of one call of a module as one graph of aten ops, and its dataflow as plain data.

Types that torch traces wrongly are corrected in it: norms on the CPU save the statistics of half-precision inputs as
their weights are. Seen in torch 2.13: fake tensors have the input's type there, whose storages are half as large.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from profiler.step_graph import StepGraph, StepOp, StepStorage


class CaptureError(ValueError):
    """A call cannot be captured as one graph of ops, or cannot run as one; the message says why."""


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of one call of a module, traced together.

    Attributes:
        module: the module of the graph; its inputs are those of the forward (parameters, buffers, the batch) and, named
            ``tangents_...``, the gradients of what it returns; its nodes are aten ops. What is written into buffers is
            returned.
        forward_outputs: the number of its outputs that the forward returns; the others are gradients of its inputs.
    """

    module: fx.GraphModule
    forward_outputs: int

    def __post_init__(self) -> None:
        correct_types(self.module.graph)

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """Nodes, and constants, that it returns: first the forward's, then the gradients."""
        (node,) = self.module.graph.find_nodes(op="output")
        return tuple(node.args[0])

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Inputs of the forward."""
        return tuple(node for node in self._placeholders() if not _is_tangent(node))

    @cached_property
    def tangents(self) -> tuple[fx.Node, ...]:
        """Inputs that only the backward has."""
        return tuple(filter(_is_tangent, self._placeholders()))

    @cached_property
    def constants(self) -> tuple[fx.Node, ...]:
        """Tensors that the forward's code holds."""
        return tuple(self.module.graph.find_nodes(op="get_attr"))

    @cached_property
    def changed_inputs(self) -> frozenset[fx.Node]:
        """Inputs (buffers) that get new contents as the forward ends."""
        changed = {each.mutated_input for _, each in self._described() if isinstance(each, InputMutationAOTOutput)}
        return frozenset(each for each in self.inputs if each.meta["desc"] in changed)

    @cached_property
    def written(self) -> tuple[Any, ...]:
        """Outputs that are written into buffers as the forward ends."""
        return tuple(node for node, described in self._described() if isinstance(described, InputMutationAOTOutput))

    @cached_property
    def returned(self) -> tuple[Any, ...]:
        """The other outputs of the forward."""
        return tuple(node for node, described in self._described() if not isinstance(described, InputMutationAOTOutput))

    def _described(self) -> list[tuple[Any, Any]]:
        (node,) = self.module.graph.find_nodes(op="output")
        return [*zip(self.outputs, node.meta["desc"], strict=True)][: self.forward_outputs]

    @cached_property
    def forward_ops(self) -> frozenset[fx.Node]:
        """Calls that the forward's outputs need."""
        needed = _needed_by(self.outputs[: self.forward_outputs])
        return frozenset(node for node in needed if node.op == "call_function")

    @cached_property
    def ops(self) -> tuple[fx.Node, ...]:
        """Calls that an output needs, in order: those of the forward first."""
        needed = _needed_by(self.outputs)
        calls = [node for node in self.module.graph.nodes if node.op == "call_function" and node in needed]
        return tuple(sorted(calls, key=lambda call: call not in self.forward_ops))

    @cached_property
    def makers(self) -> dict[int, fx.Node]:
        """Returns the op that makes each storage, in the order of ops; those of model, batch and loss are left out."""
        brought = {s for node in (*self.inputs, *self.constants, *self.tangents) for s in storages_of(node)}
        makers: dict[int, fx.Node] = {}
        for op in self.ops:
            for storage in storages_of(op):
                if storage not in brought:
                    makers.setdefault(storage, op)
        return makers

    def _placeholders(self) -> list[fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")


def _is_tangent(node: fx.Node) -> bool:
    return node.name.startswith("tangents")


def _needed_by(outputs: tuple[Any, ...]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    waiting = [output for output in outputs if isinstance(output, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def module_of(op: fx.Node) -> str:
    """Name of the module whose forward calls an op, or whose forward it is the backward of; empty where unknown."""
    if (named := op.meta.get("custom")) is not None and MODULE in named:
        return named[MODULE]
    stack = op.meta.get("nn_module_stack") or op.meta.get("fwd_nn_module_stack") or {}
    names = [name for name, _ in stack.values()]
    return names[-1].rpartition("__self__")[2].removeprefix(".") if names else ""


def storages_of(node: Any) -> dict[int, int]:
    """Numbers and bytes of the storages under what a node makes; of a constant none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    storages = [leaf.untyped_storage() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


MODULE = "planner_module"  # in what tracing notes of an op: the module that calls it


_aten = torch.ops.aten
_SAVED = (1, 2)  # of a norm's results
# By norm the first of its arguments that may have another type: weight, bias, then running statistics.
_PARAMETERS: dict[Any, range] = {
    _aten.native_layer_norm.default: range(2, 4),
    _aten.native_group_norm.default: range(1, 3),
    _aten._native_batch_norm_legit.no_stats: range(1, 3),
    _aten._native_batch_norm_legit_functional.default: range(1, 5),
    _aten._native_batch_norm_legit_no_training.default: range(1, 5),
}


def correct_types(graph: fx.Graph) -> None:
    """Give the statistics of norms, and views of them, the types that they have when the ops run."""
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _PARAMETERS:
            if _correct_norm(node):
                corrected.add(node)
        elif node.target is operator.getitem and node.args[0] in corrected:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
            corrected.add(node)
        elif is_view(node) and not corrected.isdisjoint(node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            with node.meta["val"].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
            corrected.add(node)


def _correct_norm(norm: fx.Node) -> bool:
    """Whether its statistics had the wrong type."""
    made = norm.meta["val"]
    saved: Tensor = made[_SAVED[0]]
    given = [norm.args[k] for k in _PARAMETERS[norm.target]]
    types = [each.meta["val"].dtype for each in given if isinstance(each, fx.Node)]
    if saved.device.type != "cpu" or not types or saved.dtype == types[0]:
        return False
    norm.meta["val"] = tuple(_as_type(each, types[0]) if k in _SAVED else each for k, each in enumerate(made))
    return True


def _as_type(value: FakeTensor, dtype: torch.dtype) -> Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


def is_view(node: fx.Node) -> bool:
    """Whether what a node makes is a view of what it reads."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


RUNNING_STATISTICS = (3, 4)  # of a batch norm's arguments and results: running ones, which its first run alone makes
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
    made = [op.meta["val"][place].untyped_storage()._cdata for place in RUNNING_STATISTICS]
    return tuple(numbers[storage] for storage in made)


def is_batch_norm(op: fx.Node) -> bool:
    """Whether an op normalizes by its batch, and makes running statistics beside, which no recomputation needs."""
    batch_norm = op.target is torch.ops.aten._native_batch_norm_legit_functional.default and op.args[5] is True
    return batch_norm and _saves_without_statistics(op)


def _saves_without_statistics(norm: fx.Node) -> bool:
    """Whether a run without running statistics saves the same: on the CPU, what has another type sets the type."""
    source, weight, bias = norm.args[:3]
    saved = norm.meta["val"][1]
    same_type = isinstance(source, fx.Node) and source.meta["val"].dtype == saved.dtype
    return same_type or saved.device.type != "cpu" or weight is not None or bias is not None


def second_call(op: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that recomputes an op: a batch norm neither reads nor makes statistics, which have changed meanwhile.

    Returns:
        The function, its positional and its named arguments.
    """
    if not is_batch_norm(op):
        return op.target, op.args, op.kwargs
    kept = tuple(each for k, each in enumerate(op.args) if k not in RUNNING_STATISTICS)
    return torch.ops.aten._native_batch_norm_legit.no_stats, kept, {}


def _sizes(nodes: Iterable[Any]) -> dict[int, int]:
    return {storage: size for node in nodes for storage, size in storages_of(node).items()}


def _storages(nodes: Iterable[Any]) -> set[int]:
    return set(_sizes(nodes))


def draws(op: fx.Node) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())


def has_own_generator(op: fx.Node) -> bool:
    """Whether an op is given a generator, which the code around it may make or seed anew in every call."""
    if not isinstance(op.target, torch._ops.OpOverload):
        return False
    arguments = op.target._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), op.args, strict=False)), **op.kwargs}
    return any("Generator" in str(each.type) and given.get(each.name) is not None for each in arguments)


def random_state(device: torch.device) -> Tensor:
    """The state of a device's generator: 5,056 bytes on the CPU, 16 on CUDA, both in host memory."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def device_of(op: fx.Node) -> torch.device:
    """The device of what an op makes."""
    return next(leaf.device for leaf in pytree.tree_leaves(op.meta["val"]) if isinstance(leaf, Tensor))


def state_bytes(op: fx.Node) -> int:
    """Bytes on an op's device of its generator's state."""
    device = device_of(op)
    return random_state(device).nbytes if device.type == "cpu" else 0


def run_from_state(state: Tensor, device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run an op with the numbers that came from a state; the generator is as before then."""
    before = random_state(device)
    try:
        _set_state(device, state)
        return op(*args, **kwargs)
    finally:
        _set_state(device, before)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
