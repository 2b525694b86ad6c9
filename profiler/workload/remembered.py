"""Remembered: plain data as it is now (numbers, tensors, containers of them), and how to put it back."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# More items are a table (a vocabulary, say), which no step changes and which it would take long to go through.
MOST_ITEMS = 1000
_DEPTH = 8  # Containers further inside are left alone: they may hold themselves.
_NUMBERS = (type(None), bool, int, float, complex, str, bytes)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, deque)
_OF_MODULES = frozenset(vars(nn.Module()))


class Remembered:
    """A value and what is in it. Tensors are copied to host memory and not kept alive, nor are containers.

    Args:
        value: anything; what is no plain data is put back as the same object, whatever happened to it.
        elsewhere: ids of tensors whose values somebody else puts back.
        most_items: containers of more are taken as objects.
    """

    def __init__(
        self, value: Any, elsewhere: Collection[int] = (), most_items: float = MOST_ITEMS, depth: int = _DEPTH
    ) -> None:
        self._identity = id(value)
        self._back: Callable[[Any], Any]
        if isinstance(value, Tensor) and _is_copied(value):
            self._back = _tensor(value, copied=id(value) not in elsewhere)
        elif is_container(value) and depth and len(value) <= most_items:
            self._back = self._container(value, lambda item: Remembered(item, elsewhere, most_items, depth - 1))
        else:
            self._back = lambda _: value

    def put_back(self, now: Any) -> Any:
        """The value as it was: the same object as far as it still is there, or stands in its place ``now``."""
        return self._back(now)

    def _container(self, value: Any, remember: Callable[[Any], Remembered]) -> Callable[[Any], Any]:
        if isinstance(value, tuple):
            make = getattr(type(value), "_make", tuple)
            items = [remember(item) for item in value]
            return lambda now: make(item.put_back(None) for item in items)
        shell = copy.copy(value)
        shell.clear()
        if isinstance(value, _MAPPINGS):
            pairs = {key: remember(item) for key, item in value.items()}

            def back(now: Any) -> Any:
                kept = now if id(now) == self._identity else copy.copy(shell)
                found = {key: item.put_back(kept.get(key)) for key, item in pairs.items()}
                return _filled(kept, kept.update, found)

            return back
        rest = [remember(item) for item in value]

        def refill(now: Any) -> Any:
            kept = now if id(now) == self._identity else copy.copy(shell)
            old = {id(item): item for item in kept}
            return _filled(kept, kept.extend, [item.put_back(old.get(item._identity)) for item in rest])

        return refill


def _filled(container: Any, fill: Callable[[Any], None], items: Any) -> Any:
    container.clear()
    fill(items)
    return container


def is_container(value: Any) -> bool:
    """Whether it is opened: subclasses of other people may mean something else by what is in them."""
    return type(value) in (tuple, *_MAPPINGS, *_SEQUENCES) or (isinstance(value, tuple) and hasattr(value, "_make"))


def _is_copied(tensor: Tensor) -> bool:
    """Others (sparse, nested ones) can neither be compared nor filled: they are put back as they are."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta


def _tensor(value: Tensor, *, copied: bool) -> Callable[[Any], Any]:
    reference, device, wants = weakref.ref(value), value.device, value.is_leaf and value.requires_grad
    values = value.detach().to("cpu", copy=True) if copied else None

    def back(_: Any) -> Any:
        tensor = reference()
        if tensor is None:
            return None if values is None else values.to(device, copy=True).requires_grad_(wants)
        if values is not None:
            put_values(tensor, values)
        return tensor

    return back


def put_values(tensor: Tensor, values: Tensor) -> None:
    """Write values into a tensor unless it has them; through ``.data``, so that its version stays as it was."""
    if tensor.dtype != values.dtype or not torch.equal(tensor.detach().cpu(), values):
        tensor.data.copy_(values)


class Attributes:
    """What objects keep on themselves: counters, hidden states, caches of tensors.

    Args:
        objects: modules, say.
        beside: names of attributes that are left alone.
        elsewhere: as for ``Remembered``.
    """

    def __init__(self, objects: Iterable[Any], beside: Collection[str], elsewhere: Collection[int] = ()) -> None:
        self._beside = beside
        self._objects = [(each, self._remembered(vars(each), elsewhere)) for each in objects]

    def restore(self) -> None:
        """Put back what was plain data then; what has come since goes, where it is plain data."""
        for each, before in self._objects:
            own = vars(each)
            for name in [name for name, value in own.items() if name not in before and self._counts(name, value)]:
                del own[name]
            for name, value in before.items():
                if value is not None:
                    own[name] = value.put_back(own.get(name))

    def _remembered(self, own: Mapping[str, Any], elsewhere: Collection[int]) -> dict[str, Remembered | None]:
        """By name; None for what is left alone."""
        return {name: Remembered(v, elsewhere) if self._counts(name, v) else None for name, v in own.items()}

    def _counts(self, name: str, value: Any) -> bool:
        return name not in self._beside and (isinstance(value, (Tensor, *_NUMBERS)) or is_container(value))


def attributes_of(modules: Collection[nn.Module]) -> Attributes:
    """What modules keep beside parameters and buffers."""
    known = {id(t) for module in modules for t in (*module._parameters.values(), *module._buffers.values())}
    return Attributes(modules, _OF_MODULES, known)
