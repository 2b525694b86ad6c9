"""Values and what is in them, remembered and put back: containers, tensors, generators, arrays, objects."""

from __future__ import annotations

import copy
import operator
import random
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from profiler.tensors.tensor_memory import TensorMemory
from profiler.workload.plain_objects import MOST_ITEMS, base_of, copied, is_opened, refill

_DEPTH = 8  # Containers further inside are left alone: they may hold themselves.
MAPPINGS = (dict, OrderedDict, defaultdict)
SEQUENCES = (list, deque)


class Snapshot:
    """A value and what is in it. Tensors are copied to host memory and not kept alive, nor are containers.

    Args:
        value: anything; what is no plain data is put back as the same object, whatever happened to it.
        elsewhere: ids of tensors whose values somebody else puts back.
        most_items: containers of more are taken as objects.
    """

    def __init__(
        self, value: Any, elsewhere: Collection[int] = (), most_items: float = MOST_ITEMS, depth: int = _DEPTH
    ) -> None:
        self._identity, self._type = id(value), type(value)
        self._back: Callable[[Any], Any]
        if isinstance(value, Tensor):
            self._back = _tensor(value, copied=id(value) not in elsewhere)
        elif is_container(value) and depth and len(value) <= most_items:
            self._back = self._container(value, lambda item: Snapshot(item, elsewhere, most_items, depth - 1))
        elif base_of(type(value)) is not None:
            self._back = self._filled_again(value, lambda item: Snapshot(item, elsewhere, most_items, depth - 1), depth)
        else:
            self._back = _object(value)

    def put_back(self, now: Any) -> Any:
        """The value as it was: the same object as far as it still is there, or stands in its place ``now``."""
        return self._back(now)

    def _is(self, now: Any) -> bool:
        """Whether it is the value itself; its place in memory may be another's by now."""
        return id(now) == self._identity and type(now) is self._type

    def _filled_again(self, value: Any, remember: Callable[[Any], Snapshot], depth: int) -> Callable[[Any], Any]:
        """The same container, whatever stands in its place; of long ones only which items it has."""
        contents = copied(value)
        if len(contents) > MOST_ITEMS or not depth or isinstance(contents, set):
            return lambda _: (value, refill(value, contents))[0]
        if isinstance(contents, dict):
            pairs = {key: remember(item) for key, item in contents.items()}
            return lambda _: (value, refill(value, {k: p.put_back(contents[k]) for k, p in pairs.items()}))[0]
        items = [remember(item) for item in contents]
        return lambda _: (value, refill(value, [i.put_back(old) for i, old in zip(items, contents, strict=True)]))[0]

    def _container(self, value: Any, remember: Callable[[Any], Snapshot]) -> Callable[[Any], Any]:
        if isinstance(value, tuple):
            make = getattr(type(value), "_make", tuple)
            items = [remember(item) for item in value]

            def rebuilt(now: Any) -> Any:
                there = now if self._is(now) else [None] * len(items)
                parts = [item.put_back(old) for item, old in zip(items, there, strict=True)]
                return now if self._is(now) and all(map(operator.is_, parts, there)) else make(parts)

            return rebuilt
        shell = copy.copy(value)
        shell.clear()
        if isinstance(value, MAPPINGS):
            pairs = {key: remember(item) for key, item in value.items()}

            def back(now: Any) -> Any:
                target = now if self._is(now) else copy.copy(shell)
                return filled(target, target.update, {k: item.put_back(target.get(k)) for k, item in pairs.items()})

            return back
        items = [remember(item) for item in value]

        def refilled(now: Any) -> Any:
            target = now if self._is(now) else copy.copy(shell)
            old = {id(item): item for item in target}
            return filled(target, target.extend, [item.put_back(old.get(item._identity)) for item in items])

        return refilled


def filled(container: Any, fill: Callable[[Any], None], items: Any) -> Any:
    """The container, emptied and filled."""
    container.clear()
    fill(items)
    return container


def is_container(value: Any) -> bool:
    """Whether it is made anew where it is gone: other people's subclasses may mean something else by their items."""
    return type(value) in (tuple, *MAPPINGS, *SEQUENCES) or (isinstance(value, tuple) and hasattr(value, "_make"))


_Ways = tuple[Callable[[Any], Any], Callable[[Any, Any], object]]  # how what is in an object is read, and written
GENERATORS: dict[type, _Ways] = {
    torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    np.random.Generator: (lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
}
# Objects that a step changes inside.
_OBJECTS: tuple[tuple[Any, *_Ways], ...] = (
    *((kind, *ways) for kind, ways in GENERATORS.items()),
    (np.ndarray, lambda a: a.copy(), lambda a, values: np.copyto(a, values, casting="no")),
)


def _object(value: Any) -> Callable[[Any], Any]:
    for kind, read, write in _OBJECTS:
        if isinstance(value, kind):
            inside = read(value)
            return lambda _: (value, write(value, inside))[0]
    return lambda _: value


def _tensor(value: Tensor, *, copied: bool) -> Callable[[Any], Any]:
    if value.is_meta or is_lazy(value):
        return lambda _: value  # It has no values, and takes no memory.
    if copied:
        memory = TensorMemory(value)
        return lambda _: memory.put_back()
    reference = weakref.ref(value)
    return lambda _: reference()


class Attributes:
    """What objects keep on themselves: counters, hidden states, caches of tensors.

    Args:
        objects: modules, say.
        ignored: names of attributes that are left alone.
        elsewhere: as for ``Snapshot``.
    """

    def __init__(self, objects: Iterable[Any], ignored: Collection[str], elsewhere: Collection[int] = ()) -> None:
        self._ignored = ignored
        self._objects = [(owner, self._remembered(vars(owner), elsewhere)) for owner in objects]

    def restore(self) -> None:
        """Put back what was there then; what has come since goes. Functions are no state, and stay."""
        for owner, before in self._objects:
            now = vars(owner)
            for name in [name for name, value in now.items() if name not in before and self._counts(name, value)]:
                del now[name]
            now.update({name: value.put_back(now.get(name)) for name, value in before.items()})

    def _remembered(self, attributes: Mapping[str, Any], elsewhere: Collection[int]) -> dict[str, Snapshot]:
        return {name: Snapshot(value, elsewhere) for name, value in attributes.items() if self._counts(name, value)}

    def _counts(self, name: str, value: Any) -> bool:
        return name not in self._ignored and (is_opened(type(value)) or not callable(value))
