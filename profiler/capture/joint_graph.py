"""Forward and backward of one call of a module as one graph of aten ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.utils import _pytree as pytree

from profiler.capture.traced_types import correct_types


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
