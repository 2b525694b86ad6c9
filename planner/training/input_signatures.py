"""The signature of a model's call: the names, types and shapes of its arguments, by which plans are chosen."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from profiler.workload.given_models import type_name
from profiler.workload.tensor_parts import sizes_of
from profiler.workload.tensor_trees import tensors_in

_PLAIN = -1  # the rank of what is no tensor


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors and plain arguments of one call of a model.

    Attributes:
        kind: what sizes are compared within: for every argument its path and either ``(type, rank)`` of a tensor or
            ``(value, -1)``. Floats and ``None`` do not count.
        dims: every dimension of every tensor, one after the other, in the order of ``kind``.
    """

    kind: tuple[tuple[str, str, int], ...]
    dims: tuple[int, ...]

    def covers(self, other: Signature) -> bool:
        """Whether the other call is of the same kind and in no dimension larger."""
        return self.kind == other.kind and all(own >= its for own, its in zip(self.dims, other.dims, strict=True))

    def __str__(self) -> str:
        rest, shown = list(self.dims), []
        for path, what, rank in self.kind:
            shape = tuple(rest.pop(0) for _ in range(max(0, rank)))
            shown.append(f"{path}={what}" if rank == _PLAIN else f"{path}: {what}{list(shape)}")
        return ", ".join(shown)


class ReadsSignatures(Protocol):
    """What plans are chosen by."""

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], /) -> Signature:
        """The signature of a call of the model with these arguments."""
        ...

    def of_batch(self, inputs: Any, /) -> Signature:
        """The signature of the call that a workload makes with these inputs."""
        ...


class SignatureReader:
    """Reads the signatures of one model's calls: an argument by position is the same as by its name."""

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [parameter.name for parameter in parameters if parameter.kind in positional]

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """The signature of a call with these arguments."""
        names = [*self._names[: len(args)], *(f"*{k}" for k in range(len(self._names), len(args)))]
        return signature_of({**dict(zip(names, args, strict=True)), **kwargs})

    def of_batch(self, inputs: Any) -> Signature:
        """The signature of the call that a workload makes with these inputs."""
        if isinstance(inputs, Mapping):
            return self((), inputs)
        return self(inputs, {}) if isinstance(inputs, (tuple, list)) else self((inputs,), {})


def signature_of(arguments: Mapping[str, Any]) -> Signature:
    """The signature of arguments by their names."""
    entries: list[tuple[tuple[str, str, int], Sequence[int]]] = []
    for name, value in sorted(arguments.items()):
        _read(name, value, entries)
    return Signature(tuple(entry for entry, _ in entries), tuple(d for _, shape in entries for d in shape))


def _read(path: str, value: Any, entries: list[tuple[tuple[str, str, int], Sequence[int]]]) -> None:
    if isinstance(value, Tensor):
        kind = type_name(value.dtype) + (" with gradient" if value.requires_grad else "")
        entries.append(((path, kind, value.dim()), sizes_of(value)))
    elif isinstance(value, (bool, int, str)):
        entries.append(((path, repr(value), _PLAIN), ()))
    elif isinstance(value, Mapping):
        for key, item in sorted(value.items(), key=lambda pair: str(pair[0])):
            _read(f"{path}.{key}", item, entries)
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            _read(f"{path}.{number}", item, entries)
    elif value is not None and not isinstance(value, float):
        entries.append(((path, type(value).__name__, _PLAIN), ()))
        for number, tensor in enumerate(tensors_in(value)):
            _read(f"{path}.{number}", tensor, entries)
