"""Nested arguments and outputs: finding and replacing the tensors in tuples, dicts, dataclasses and their like."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_LEAVES = (str, bytes, int, float, bool, type(None))


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of ``tree`` in a fixed order; a tensor that stands twice is listed twice."""
    tensors: list[Tensor] = []
    _add_tensors(tree, tensors)
    return tensors


def _add_tensors(tree: Any, tensors: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif type(tree) in (tuple, list):  # Nearly everything is one of these two, or a leaf: no copies are made of them.
        for item in tree:
            _add_tensors(item, tensors)
    elif type(tree) is dict:
        for item in tree.values():
            _add_tensors(item, tensors)
    elif not isinstance(tree, _LEAVES):
        map_tensors(lambda tensor: tensors.append(tensor) or tensor, tree)


def device_of(tree: Any) -> torch.device:
    """The device that the tensors of ``tree`` are on: an accelerator's where any is, else the CPU."""
    devices = [tensor.device for tensor in tensors_in(tree)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def map_tensors(change: Callable[[Any], Any], tree: Any, kind: type = Tensor) -> Any:
    """A copy of ``tree`` in which each tensor (or other ``kind`` of leaf) is replaced by ``change(leaf)``.

    Containers are rebuilt with their own type; objects that are no container
    stay the very same objects. The order of calls is that of ``tensors_in``.
    """
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, _LEAVES):
        return tree
    container = type(tree)
    if container in (tuple, list):
        return container(map_tensors(change, item, kind) for item in tree)
    if container is dict:
        return {key: map_tensors(change, item, kind) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(container, "_make"):  # a named tuple
        return container._make(map_tensors(change, item, kind) for item in tree)
    if container in pytree.SUPPORTED_NODES:
        # Not by ``tree_flatten``: its inner function refers to itself, a cycle that would keep the tree alive.
        node = pytree.SUPPORTED_NODES[container]
        leaves, context = node.flatten_fn(tree)
        return node.unflatten_fn([map_tensors(change, leaf, kind) for leaf in leaves], context)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Mapping)):
        return _map_dataclass(change, tree, kind)
    return tree


def in_new_containers(tree: Any) -> Any:
    """The same tensors in containers of their own, which a call may add to."""
    return map_tensors(lambda tensor: tensor, tree)


def opaque_holder(tree: Any) -> str:
    """Class of an object in ``tree`` that holds tensors out of ``map_tensors``'s sight; empty if there is none."""
    holders: list[str] = []

    def look(leaf: Any) -> Any:
        if not holders and not isinstance(leaf, _TRANSPARENT) and _holds_tensor(leaf, depth=3):
            holders.append(type(leaf).__name__)
        return leaf

    map_tensors(look, tree, kind=_NotAContainer)
    return holders[0] if holders else ""


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, _TRANSPARENT):
        return False
    if isinstance(value, Mapping):
        inside: Any = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inside = list(value)
    else:
        slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ()) if isinstance(name, str)]
        inside = [*getattr(value, "__dict__", {}).values(), *slots]
    return any(_holds_tensor(item, depth - 1) for item in inside)


class _ContainerCheck(type):
    def __instancecheck__(cls, value: Any) -> bool:
        container = type(value)
        known = container in (tuple, list, dict) or container in pytree.SUPPORTED_NODES or hasattr(container, "_make")
        return not known and not (dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)))


class _NotAContainer(metaclass=_ContainerCheck):
    """Everything that ``map_tensors`` does not open."""


# Values that hold no tensors of the step, or whose tensors are parameters and buffers.
_TRANSPARENT = (Tensor, nn.Module, str, bytes, int, float, bool, complex, type, type(None), torch.dtype, torch.device)


def _map_dataclass(change: Callable[[Any], Any], tree: Any, kind: type) -> Any:
    changed = copy.copy(tree)
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name, None)
        # object.__setattr__: frozen dataclasses are rebuilt too.
        object.__setattr__(changed, field.name, map_tensors(change, value, kind))
    return changed


class _TensorSlot:
    """Stands in a tree for its n-th tensor."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def without_tensors(tree: Any) -> Any:
    """The tree with a slot for each of its tensors."""
    numbers = itertools.count()
    return map_tensors(lambda _: _TensorSlot(next(numbers)), tree)


def with_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """What ``without_tensors`` made, with tensors in their slots again."""
    return map_tensors(lambda slot: tensors[slot.number], tree, kind=_TensorSlot)
