"""Nested arguments and outputs: finding and replacing the tensors in tuples, dicts, dataclasses and their like."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of ``tree`` in a fixed order; a tensor that stands twice is listed twice."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, tree)
    return found


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """A copy of ``tree`` in which each tensor is replaced by ``change(tensor)``.

    Containers are rebuilt with their own type; objects that are no container
    stay the very same objects. The order of calls is that of ``tensors_in``.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, (str, bytes, int, float, bool)) or tree is None:
        return tree
    kind = type(tree)
    if kind in (tuple, list):
        return kind(map_tensors(change, item) for item in tree)
    if kind is dict:
        return {key: map_tensors(change, item) for key, item in tree.items()}
    if kind in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(tree):
        leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
        return pytree.tree_unflatten([map_tensors(change, leaf) for leaf in leaves], spec)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Mapping)):
        return _map_dataclass(change, tree)
    return tree


def _map_dataclass(change: Callable[[Tensor], Any], tree: Any) -> Any:
    changed = copy.copy(tree)
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name, None)
        # object.__setattr__: frozen dataclasses are rebuilt too.
        object.__setattr__(changed, field.name, map_tensors(change, value))
    return changed
