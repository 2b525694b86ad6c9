"""Nested arguments and outputs: finding and replacing the tensors in containers, dataclasses and plain objects."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Key = TypeVar("Key")
Value = TypeVar("Value")


def cached_by_identity(function: Callable[[Key], Value]) -> Callable[[Key], Value]:
    """Caches what a function returns for an object, for as long as that object lives.

    ``functools.cache`` would keep it for good: a class that is made inside a function, and all that its methods refer
    to. What the function returns must not refer to the object.
    """
    known: dict[int, Value] = {}
    references: dict[int, weakref.ref[Key]] = {}

    @functools.wraps(function)
    def cached(key: Key) -> Value:
        place = id(key)
        if place in known:
            return known[place]

        def forget(_: weakref.ref[Key]) -> None:
            known.pop(place, None)
            references.pop(place, None)

        value = function(key)
        references[place] = weakref.ref(key, forget)
        known[place] = value
        return value

    return cached


_LEAVES = (str, bytes, int, float, bool, type(None))
_DEPTH = 4  # of containers and objects in an object, down to its tensors
_MOST_ITEMS = 1000  # of a container in an object: more are a table, which it would take long to go through
# What objects of these packages hold is theirs.
_CLOSED_PACKAGES = frozenset(("numpy", "planner", "profiler", "solvers", "torch")) | (
    sys.stdlib_module_names - {"argparse", "collections", "types"}
)
_BASES: tuple[Any, ...] = (dict, list, tuple)
_Known = dict[int, Any]  # what has been made of objects, by their ids


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of ``tree`` in a fixed order; a tensor that stands twice is listed twice, an object's once."""
    tensors: list[Tensor] = []
    _add_tensors(tree, tensors, {})
    return tensors


def _add_tensors(tree: Any, tensors: list[Tensor], known: _Known) -> None:
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif type(tree) in (tuple, list):  # Nearly everything is one of these two, or a leaf: no copies are made of them.
        for item in tree:
            _add_tensors(item, tensors, known)
    elif type(tree) is dict:
        for item in tree.values():
            _add_tensors(item, tensors, known)
    elif not isinstance(tree, _LEAVES):
        _map(lambda tensor: tensors.append(tensor) or tensor, tree, Tensor, known)


def device_of(tree: Any) -> torch.device:
    """The device that the tensors of ``tree`` are on: an accelerator's where any is, else the CPU."""
    devices = [tensor.device for tensor in tensors_in(tree)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def map_tensors(change: Callable[[Any], Any], tree: Any, kind: type = Tensor) -> Any:
    """A copy of ``tree`` in which each tensor (or other ``kind`` of leaf) is replaced by ``change(leaf)``.

    Containers are rebuilt with their own type, and so are objects that hold tensors in their attributes, each once;
    other objects stay the very same. The order of calls is that of ``tensors_in``.
    """
    return _map(change, tree, kind, {})


def _map(change: Callable[[Any], Any], tree: Any, kind: type, known: _Known) -> Any:
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, _LEAVES):
        return tree
    container: Any = type(tree)
    if container in (tuple, list):
        return container(_map(change, item, kind, known) for item in tree)
    if container is dict:
        return {key: _map(change, item, kind, known) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(container, "_make"):  # a named tuple
        return container._make(_map(change, item, kind, known) for item in tree)
    if container in pytree.SUPPORTED_NODES:
        # Not by ``tree_flatten``: its inner function refers to itself, a cycle that would keep the tree alive.
        node = pytree.SUPPORTED_NODES[container]
        leaves, context = node.flatten_fn(tree)
        return node.unflatten_fn([_map(change, leaf, kind, known) for leaf in leaves], context)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Mapping)):
        return _map_dataclass(change, tree, kind, known)
    if id(tree) in known:
        return known[id(tree)]
    if isinstance(tree, weakref.ref):  # A part that refers to the object that it is in.
        copied = known.get(id(tree()))
        return tree if copied is None else weakref.ref(copied)
    base = _base_of(container)
    return _map_object(change, tree, kind, known, base) if base and _holds(tree, kind, _DEPTH) else tree


@cached_by_identity
def _base_of(kind: type) -> Any:
    """How objects of a type can be made anew from what is in them: as a container, or as an ``object``; None if not."""
    package = kind.__module__.partition(".")[0]
    if package in _CLOSED_PACKAGES or issubclass(kind, (*_TRANSPARENT, OrderedDict)) or hasattr(kind, "__del__"):
        return None
    base: Any = next((base for base in (*_BASES, SimpleNamespace) if issubclass(kind, base)), object)
    try:
        base.__new__(kind)
    except TypeError:  # It is of another base, which has values of its own.
        return None
    return base if base is not object or kind.__dictoffset__ or slots_of(kind) else None


def _map_object(change: Callable[[Any], Any], tree: Any, kind: type, known: _Known, base: Any) -> Any:
    changed: Any
    if base is tuple:
        changed = tuple.__new__(type(tree), (_map(change, item, kind, known) for item in tuple.__iter__(tree)))
    else:
        changed = base.__new__(type(tree))
    known[id(tree)] = changed  # Before what is in it: that may refer to it.
    if base is list:
        list.extend(changed, (_map(change, item, kind, known) for item in list.__iter__(tree)))
    elif base is dict:
        for key, item in dict.items(tree):
            dict.__setitem__(changed, key, _map(change, item, kind, known))
    for name in slots_of(type(tree)):
        if hasattr(tree, name):
            object.__setattr__(changed, name, _map(change, getattr(tree, name), kind, known))
    if attributes := getattr(tree, "__dict__", None):
        changed.__dict__.update({name: _map(change, item, kind, known) for name, item in attributes.items()})
    return changed


@cached_by_identity
def slots_of(kind: type) -> tuple[str, ...]:
    """The names of the slots that a type and its bases declare, as they are for Python."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            private = name.startswith("__") and not name.endswith("__")
            if private:
                found.append(f"_{base.__name__.lstrip('_')}{name}")
            elif not name.startswith("__"):
                found.append(name)
    return tuple(found)


def _holds(value: Any, kind: type, depth: int, but: Collection[int] = ()) -> bool:
    """Whether a leaf of a kind is in a value, as far as ``_map`` goes; those with ids in ``but`` do not count."""
    if isinstance(value, kind):
        return id(value) not in but
    if depth == 0 or isinstance(value, _TRANSPARENT):
        return False
    return any(_holds(item, kind, depth - 1, but) for item in _inside(value))


def _inside(value: Any) -> Iterable[Any]:
    contents: Iterable[Any] = ()
    for base in (*_BASES, set, frozenset, deque):
        if isinstance(value, base) and base.__len__(value) <= _MOST_ITEMS:
            contents = dict.values(value) if base is dict else base.__iter__(value)
    slots = (getattr(value, name, None) for name in slots_of(type(value)))
    return [*contents, *getattr(value, "__dict__", {}).values(), *slots]


def in_new_containers(tree: Any) -> Any:
    """Returns the same tensors in new containers, which a call may add to."""
    return map_tensors(lambda tensor: tensor, tree)


def opaque_holder(tree: Any) -> str:
    """Class of an object in ``tree`` that holds tensors out of ``map_tensors``'s sight; empty if there is none."""
    seen = {id(tensor) for tensor in tensors_in(tree)}
    return next((type(leaf).__name__ for leaf in objects_in(tree) if _holds(leaf, Tensor, _DEPTH, seen)), "")


def objects_in(tree: Any) -> list[Any]:
    """The leaves of ``tree`` that are neither tensors nor plain values, nor in an object themselves."""
    objects: list[Any] = []
    map_tensors(lambda leaf: objects.append(leaf) or leaf, tree, kind=_NotAContainer)
    return [leaf for leaf in objects if not isinstance(leaf, _TRANSPARENT)]


class _ContainerCheck(type):
    def __instancecheck__(cls, value: Any) -> bool:
        container = type(value)
        known = container in (tuple, list, dict) or container in pytree.SUPPORTED_NODES or hasattr(container, "_make")
        return not known and not (dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)))


class _NotAContainer(metaclass=_ContainerCheck):
    """Everything but containers and dataclasses."""


# Values that hold no tensors of the step, or whose tensors are parameters and buffers.
_TRANSPARENT = (Tensor, nn.Module, str, bytes, int, float, bool, complex, type, type(None), torch.dtype, torch.device)


def _map_dataclass(change: Callable[[Any], Any], tree: Any, kind: type, known: _Known) -> Any:
    changed = copy.copy(tree)
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name, None)
        # object.__setattr__: frozen dataclasses are rebuilt too.
        object.__setattr__(changed, field.name, _map(change, value, kind, known))
    return changed


def contents_of(tree: Any, kind: type = Tensor) -> Any:
    """The items and attributes of an object that ``map_tensors`` rebuilds, in plain containers.

    Args:
        tree: a named tuple, a registered container, a dataclass or an object.
        kind: the type of the leaves that are replaced.

    Returns:
        Its items and attributes; None where the tree stays the very same object.
    """
    container: Any = type(tree)
    if isinstance(tree, tuple) and hasattr(container, "_make"):
        return tuple(tree)
    if container in pytree.SUPPORTED_NODES:
        leaves, context = pytree.SUPPORTED_NODES[container].flatten_fn(tree)
        return tuple(leaves), context
    is_record = dataclasses.is_dataclass(tree) and not isinstance(tree, (type, Mapping))
    if not is_record and not (_base_of(container) and _holds(tree, kind, _DEPTH)):
        return None
    items: Any = ()
    if isinstance(tree, dict):
        items = tuple(dict.items(tree))
    elif isinstance(tree, (list, tuple)):
        items = tuple(tree)
    slots = {name: getattr(tree, name, None) for name in slots_of(container)}
    return items, {**slots, **getattr(tree, "__dict__", {})}


class TensorSlot:
    """Stands in a tree for its n-th tensor."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def without_tensors(tree: Any) -> Any:
    """The tree with a slot for each of its tensors."""
    numbers = itertools.count()
    return map_tensors(lambda _: TensorSlot(next(numbers)), tree)


def with_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns the tree that ``without_tensors`` made, with tensors in their slots again."""
    return map_tensors(lambda slot: tensors[slot.number], tree, kind=TensorSlot)
