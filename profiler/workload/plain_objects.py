"""Decides which objects are opened, to remember their contents; reads and refills containers past their methods."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from profiler.workload.tensor_trees import cached_by_identity, slots_of

_BASES: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)  # the first that fits counts
# What is in these is no state of a model, or is shared with other threads; so it is with Python's own library.
_CLOSED_PACKAGES = frozenset(("numpy", "planner", "profiler", "solvers", "torch"))
_OPENED_MODULES = (
    "argparse",
    "collections",
    "torch.optim",
    "torch.amp",
    "torch.cuda.amp",
    "torch.distributed.pipelining",
    "profiler.workload.workload",  # A step may train the model and step the optimizer of one.
)
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
_CLOSED = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
# More items are a table (a vocabulary, say), which no step changes and which it would take long to go through.
MOST_ITEMS = 1000
_HEAP_TYPE = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE: unset for the types that C code defines statically
GONE = object()  # in the place of a slot that is empty


@cached_by_identity
def base_of(kind: type) -> Any:
    """The container of Python's own that containers of a type are; None for other types."""
    closed = _is_closed(kind) and kind.__module__ not in ("builtins", "collections")
    return None if closed else next((base for base in _BASES if issubclass(kind, base)), None)


@cached_by_identity
def is_opened(kind: type) -> bool:
    """Whether what objects of a type keep on themselves is remembered, be they callable or not."""
    if issubclass(kind, _CLOSED) or (_is_closed(kind) and kind is not SimpleNamespace):
        return False
    return bool(kind.__dictoffset__ or slots_of(kind))


def _is_closed(kind: type) -> bool:
    module = kind.__module__
    package = module.partition(".")[0]
    opened = any(module == each or module.startswith(f"{each}.") for each in _OPENED_MODULES)
    if opened or not (package in _CLOSED_PACKAGES or package in sys.stdlib_module_names):
        return False
    if _is_of_its_module(kind):
        return True
    bases = [base for base in kind.__bases__ if base is not object]
    return bool(bases) and all(map(_is_closed, bases))


def _is_of_its_module(kind: type) -> bool:
    """Whether a class is defined in the module that its ``__module__`` names.

    A class that a call creates names the module of that call: ``types.new_class``, ``make_dataclass``, and metaclasses
    such as the one of PyG's ``Batch``.
    """
    if "<locals>" in kind.__qualname__ or not kind.__flags__ & _HEAP_TYPE:
        return True
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def in_slots(value: Any) -> tuple[Any, ...]:
    """Returns the contents of an object's slots."""
    return tuple(_in_slot(value, name) for name in slots_of(type(value)))


def _in_slot(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return GONE


def set_slots(value: Any, contents: tuple[Any, ...]) -> None:
    """Put back those slots of an object that hold something else now, past what its class makes of setting them."""
    for name, item in zip(slots_of(type(value)), contents, strict=True):
        if _in_slot(value, name) is not item:
            if item is GONE:
                object.__delattr__(value, name)
            else:
                object.__setattr__(value, name, item)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, the very dict of them; None where it has none."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def items_of(container: Any) -> Iterator[Any]:
    """The items of a container, values of a dict: what is there, whatever its class makes of being asked."""
    return iter(dict.values(container)) if isinstance(container, dict) else _kind_of(container).__iter__(container)


def size_of(container: Any) -> int:
    """How many items a container has, whatever its class makes of being asked."""
    return _kind_of(container).__len__(container)


def _kind_of(container: Any) -> Any:
    return next(kind for kind in (dict, tuple, list, deque, set, frozenset) if isinstance(container, kind))


def copied(container: Any) -> Any:
    """Returns the contents of a container, in one of Python's own."""
    kind = type(container)
    if kind is dict or kind is list:  # As nearly always.
        return container.copy()
    base = base_of(kind)
    if base is list or base is deque:
        return list(base.__iter__(container))
    return set(items_of(container)) if base is set else dict(base.items(container))


def refill(container: Any, contents: Any) -> None:
    """Make a container hold what ``copied`` gave, unless it does: compiled code asks whether it was written to."""
    kind = type(container)
    if kind is dict or kind is OrderedDict:
        _refill_dict(container, contents, kind)
        return
    base = base_of(kind)
    if base is set:
        if set(items_of(container)) != contents:
            set.clear(container)
            set.update(container, contents)
    elif base is list or base is deque:
        if size_of(container) != len(contents) or not all(map(is_, base.__iter__(container), contents)):
            base.clear(container)
            base.extend(container, contents)
    else:
        _refill_dict(container, contents, base)


class Change(NamedTuple):
    """A container with what ``copied`` gave of it before something changed it, and after."""

    container: Any
    before: Any
    after: Any

    def is_plain(self) -> bool:
        """Whether what came into it is all numbers, names and the like."""
        before, after = (each.values() if isinstance(each, dict) else each for each in self[1:])
        known = {id(value) for value in before}
        return all(id(value) in known or type(value) in PLAIN for value in after)

    def make(self) -> None:
        """Have the container hold what it did after."""
        refill(self.container, self.after)

    def undo(self) -> None:
        """Have it hold what it did before."""
        refill(self.container, self.before)


def _refill_dict(container: Any, contents: dict[Any, Any], base: Any) -> None:
    same_keys = size_of(container) == len(contents) and all(map(is_, base.__iter__(container), contents))
    if same_keys and all(map(is_, base.values(container), contents.values())):
        return
    if not same_keys:
        base.clear(container)
    if base is dict:
        dict.update(container, contents)
    else:
        for key, value in contents.items():
            base.__setitem__(container, key, value)


class GrowingContainer:
    """A list or dict of too many items to be copied: its length before a first run, and both its ends.

    Args:
        name: the name of the attribute, for messages.
        container: a list or dict with an item at least.

    Attributes:
        shown: its description, for messages.
    """

    __slots__ = ("_base", "_container", "_ends", "_length", "shown")

    def __init__(self, name: str, container: Any) -> None:
        self._container, self._length = container, len(container)
        self.shown = f"{name!r}, a {type(container).__name__} of {self._length} items"
        self._base = base_of(type(container))
        self._ends = self._first_and_last()

    def _first_and_last(self) -> tuple[Any, Any]:
        if self._base is list:
            return list.__getitem__(self._container, 0), list.__getitem__(self._container, self._length - 1)
        keys = self._base.__reversed__(self._container)
        for _ in range(len(self._container) - self._length):
            next(keys)
        return next(self._base.__iter__(self._container)), next(keys)

    def is_as_it_was(self) -> bool:
        """Whether it is as long as it was and has the same ends."""
        return len(self._container) == self._length and self.only_grew()

    def only_grew(self) -> bool:
        """Whether nothing but growing at its end is seen of it."""
        if len(self._container) < self._length:
            return False
        first, last = self._first_and_last()
        return first is self._ends[0] and last is self._ends[1]

    def cut(self) -> list[Any]:
        """Make it as long as it was; returns what came since, for ``extend_again``."""
        if self._base is list:
            tail = list.__getitem__(self._container, slice(self._length, None))
            list.__delitem__(self._container, slice(self._length, None))
            return tail
        added = [self._base.popitem(self._container) for _ in range(len(self._container) - self._length)]
        return added[::-1]

    def extend_again(self, tail: list[Any]) -> None:
        """Make it hold what it was cut off, in the place of what came meanwhile."""
        self.cut()
        if self._base is list:
            list.extend(self._container, tail)
            return
        for key, value in tail:
            self._base.__setitem__(self._container, key, value)
