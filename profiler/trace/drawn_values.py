"""Random numbers of torch that a model's Python code reads, to decide what it runs; and others read in their place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.op_schema import traits_of
from profiler.tensors.storages import storage_key
from profiler.tensors.tensor_parts import any_distributed
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

Site = tuple[str, int, int]  # the file and the line that reads, and which of its instructions
Number = bool | int | float

_READS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist")
_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
# Larger random tensors are data: masks, noise, what is dropped out.
MOST_ELEMENTS = 1024
# Of so many values a whole number may have, each is tried; of more, the smallest and the largest.
MOST_VALUES = 16
_UNIT_VALUES = (0.0, 0.5, 1.0 - 2.0**-24)  # the smallest and the largest that torch.rand gives, and one between


@contextmanager
def read_instead(values: Mapping[Site, Number]) -> Iterator[None]:
    """Inside, what Python reads of tensors at these places is the given number; the numbers are drawn all the same."""
    if not values:
        yield
        return
    with _intercepted(lambda site, tensor, value: _like(value, values[site]) if site in values else value):
        yield


@contextmanager
def lists_noted(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, ``note`` is called with each tensor of which Python reads several whole numbers at once: sizes, often."""

    def seen(_: Site, tensor: Tensor, value: Any) -> Any:
        if isinstance(value, list) and len(value) > 1 and all(type(number) is int for number in value):
            note(tensor)
        return value

    with _intercepted(seen):
        yield


class DrawnValues(TorchDispatchMode):
    """Follows small random tensors from where they are drawn to where Python reads them.

    Args:
        instead: as for ``read_instead``.

    Attributes:
        choices: by place, the values that may be read there; the same draw gives any of them.
    """

    def __init__(self, instead: Mapping[Site, Number]) -> None:
        super().__init__()
        self.choices: dict[Site, tuple[Number, ...]] = {}
        self._instead = instead
        self._drawn: dict[int, range | None] = {}  # by storage; with the whole numbers that it was drawn from
        self._alive: list[Tensor] = []  # so that no other storage gets its address

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, what is drawn and read is followed."""
        with self, _intercepted(self._read):
            yield
        self._alive.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_distributed(types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        inputs, made = tensors_in((args, kwargs)), [t for t in tensors_in(output) if _is_small(t)]
        if made and (_draws(func, inputs) or self._derives(inputs)):
            for tensor in made:
                if storage_key(tensor) not in self._drawn:
                    self._drawn[storage_key(tensor)] = _range_of(func, args)
                    self._alive.append(tensor)
        return output

    def _derives(self, inputs: list[Tensor]) -> bool:
        """Whether an op computes from drawn numbers, and from nothing else but single ones."""
        drawn = [_is_small(tensor) and storage_key(tensor) in self._drawn for tensor in inputs]
        return any(drawn) and all(d or t.numel() <= 1 for d, t in zip(drawn, inputs, strict=True))

    def _read(self, site: Site, tensor: Tensor, value: Any) -> Any:
        if _is_small(tensor) and storage_key(tensor) in self._drawn:
            found = _choices(value, self._drawn[storage_key(tensor)])
            self.choices[site] = tuple(sorted({*self.choices.get(site, ()), *found}))
        return _like(value, self._instead[site]) if site in self._instead else value


def _is_small(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() <= MOST_ELEMENTS


def _draws(op: Any, inputs: list[Tensor]) -> bool:
    """Whether an op makes random numbers, and not something random of activations."""
    return traits_of(op).random and not any(tensor.requires_grad for tensor in inputs)


def _range_of(op: Any, args: tuple[Any, ...]) -> range | None:
    """The whole numbers that an op draws from, where it says so."""
    name = op._schema.name
    bounds = args if name == "aten::randint" else args[1:] if name == "aten::random_" else ()
    ends = [value for value in bounds[:2] if isinstance(value, int)]
    return range(*ends) if ends else None


def _choices(value: Any, drawn_from: range | None) -> tuple[Number, ...]:
    leaves = list(_leaves(value))
    if not leaves:
        return ()
    if isinstance(leaves[0], bool):
        return (False, True)
    if isinstance(leaves[0], float) and all(0.0 <= leaf <= 1.0 for leaf in leaves):
        return _UNIT_VALUES
    if isinstance(leaves[0], int) and drawn_from:
        return tuple(drawn_from) if len(drawn_from) <= MOST_VALUES else (drawn_from[0], drawn_from[-1])
    return min(leaves), max(leaves)


def _leaves(value: Any) -> Iterator[Number]:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, (bool, int, float)):
        yield value


def _like(value: Any, number: Number) -> Any:
    """The number in place of each one of a value."""
    if isinstance(value, list):
        return [_like(item, number) for item in value]
    return type(value)(number)


@contextmanager
def _intercepted(change: Callable[[Site, Tensor, Any], Any]) -> Iterator[None]:
    """Inside, what Python reads of a tensor goes through ``change``; nothing else gets slower."""
    before = {name: vars(Tensor).get(name) for name in _READS}
    for name in _READS:
        setattr(Tensor, name, _reading(getattr(Tensor, name), change))
    try:
        yield
    finally:
        for name, own in before.items():
            if own is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, own)


def _reading(own: Callable[..., Any], change: Callable[[Site, Tensor, Any], Any]) -> Callable[..., Any]:
    def read(tensor: Tensor, *args: Any) -> Any:
        return change(_site(), tensor, own(tensor, *args))

    return read


def _site() -> Site:
    """Where a tensor is read: the innermost code that is neither torch's nor here."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OF_TORCH, __file__)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_lasti
