"""Forward and backward of one call of a module as one graph of aten ops.

Types that torch traces wrongly are corrected in it: norms on the CPU save the statistics of half-precision inputs as
their weights are. Seen in torch 2.13: fake tensors have the input's type there, whose storages are half as large.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


class CaptureError(ValueError):
    """A call cannot be captured as one graph of ops, or cannot run as one; the message says why."""


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of one call of a module, traced together.

    Attributes:
        module: its inputs are what the forward reads (parameters, buffers, the batch) and, named ``tangents_...``,
            the gradients of what it returns; its nodes are aten ops. What is written into buffers is returned.
        forward_outputs: how many of its outputs the forward returns; the others are gradients of its inputs.
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
        """By storage the op that makes it, in the order of ops; what model, batch and loss bring is left out."""
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
STATISTICS = (1, 2)  # of a norm's results
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
    saved: Tensor = made[STATISTICS[0]]
    given = [norm.args[k] for k in _PARAMETERS[norm.target]]
    types = [each.meta["val"].dtype for each in given if isinstance(each, fx.Node)]
    if saved.device.type != "cpu" or not types or saved.dtype == types[0]:
        return False
    norm.meta["val"] = tuple(_as_type(each, types[0]) if k in STATISTICS else each for k, each in enumerate(made))
    return True


def _as_type(value: FakeTensor, dtype: torch.dtype) -> Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


def is_view(node: fx.Node) -> bool:
    """Whether what a node makes is a view of what it reads."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
