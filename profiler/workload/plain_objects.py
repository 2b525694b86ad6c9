"""Which objects are opened, to remember what is in them; and containers by what they are made of, whatever they do."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Iterable
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_BASES: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)  # the first that fits counts
# What is in these is no state of a model, or is shared with other threads.
_CLOSED_PACKAGES = frozenset(
    ("asyncio", "concurrent", "ctypes", "functools", "inspect", "logging", "multiprocessing", "numpy", "planner",
     "profiler", "solvers", "threading", "torch", "typing", "weakref")
)  # fmt: skip
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), Tensor, nn.Parameter))
_CLOSED = (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
# More items are a table (a vocabulary, say), which no step changes and which it would take long to go through.
MOST_ITEMS = 1000
_OPENED_DEPTH = 4  # of objects and containers in each other
GONE = object()  # in the place of a slot that is empty


@functools.cache
def base_of(kind: type) -> Any:
    """The container of Python's own that containers of a type are; None for other types."""
    closed = kind.__module__.partition(".")[0] in _CLOSED_PACKAGES
    return None if closed else next((base for base in _BASES if issubclass(kind, base)), None)


@functools.cache
def is_opened(kind: type) -> bool:
    """Whether what objects of a type keep on themselves is remembered, be they callable or not."""
    closed = issubclass(kind, _CLOSED) or kind.__module__.partition(".")[0] in _CLOSED_PACKAGES
    return not closed and bool(kind.__dictoffset__ or slots_of(kind))


@functools.cache
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


def in_slots(value: Any) -> tuple[Any, ...]:
    """What the slots of an object hold now."""
    return tuple(getattr(value, name, GONE) for name in slots_of(type(value)))


def set_slots(value: Any, contents: tuple[Any, ...]) -> None:
    """Put back those slots of an object that hold something else now, past what its class makes of setting them."""
    for name, item in zip(slots_of(type(value)), contents, strict=True):
        if getattr(value, name, GONE) is not item:
            if item is GONE:
                object.__delattr__(value, name)
            else:
                object.__setattr__(value, name, item)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, the very dict of them; None where it has none."""
    attributes = getattr(value, "__dict__", None)
    return attributes if type(attributes) is dict else None


def inside_of(values: Iterable[Any]) -> tuple[list[Any], list[nn.Module]]:
    """Objects that are opened, and modules, in values and in what is in them, each once."""
    objects: list[Any] = []
    modules: list[nn.Module] = []
    known: set[int] = set()
    level = list(values)
    for _ in range(_OPENED_DEPTH + 1):
        following: list[Any] = []
        for value in level:
            kind = type(value)
            if kind in _PLAIN or id(value) in known:
                continue
            known.add(id(value))
            if isinstance(value, nn.Module):
                modules.append(value)
                continue
            if is_opened(kind):
                objects.append(value)
                following += [*(attributes_of(value) or {}).values(), *in_slots(value)]
            if (isinstance(value, tuple) or base_of(kind) is not None) and len(value) <= MOST_ITEMS:
                contents = value if isinstance(value, tuple) else copied(value)
                following += contents.values() if isinstance(contents, dict) else contents
        level = following
    return objects, modules


def copied(container: Any) -> Any:
    """What is in a container, in one of Python's own."""
    kind = type(container)
    if kind is dict or kind is list:  # As nearly always.
        return container.copy()
    base = base_of(kind)
    if base is list or base is deque:
        return list(base.__iter__(container))
    return set(container) if base is set else dict(base.items(container))


def refill(container: Any, contents: Any) -> None:
    """Make a container hold what ``copied`` gave, unless it does: compiled code asks whether it was written to."""
    kind = type(container)
    if kind is dict or kind is OrderedDict:
        _refill_dict(container, contents, kind)
        return
    base = base_of(kind)
    if base is set:
        if container != contents:
            set.clear(container)
            set.update(container, contents)
    elif base is list or base is deque:
        if len(container) != len(contents) or not all(map(is_, base.__iter__(container), contents)):
            base.clear(container)
            base.extend(container, contents)
    else:
        _refill_dict(container, contents, base)


def _refill_dict(container: Any, contents: dict[Any, Any], base: Any) -> None:
    same_keys = len(container) == len(contents) and all(map(is_, base.__iter__(container), contents))
    if same_keys and all(map(is_, base.values(container), contents.values())):
        return
    if not same_keys:
        base.clear(container)
    if base is dict:
        dict.update(container, contents)
    else:
        for key, value in contents.items():
            base.__setitem__(container, key, value)
