"""The signature of a model's call, by which plans are chosen, and profiles of signatures that were never profiled.

A signature has the names, types and shapes of the arguments. The profile of a new one is expected from profiled ones
that differ from it in one size.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from planner.capacity.scaling import STRAIGHT, ProfileScaling, whole_at
from profiler.records import Profile
from profiler.workload.given_models import type_name
from profiler.workload.tensor_parts import sizes_of
from profiler.workload.tensor_trees import tensors_in

Basis = Literal["interpolated", "extrapolated", "covered"]

_PLAIN = -1  # the rank of what is no tensor


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors and plain arguments of one call of a model.

    Attributes:
        kind: only calls of one kind are compared. For every argument its path and either ``(type, rank)`` of a
            tensor or ``(value, -1)``. Floats and ``None`` do not count.
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
    """Gives the signatures by which plans are chosen."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLine:
    """Signatures of one kind that lie on a line, rising in no dimension against another.

    Attributes:
        signatures: two or more, each covered by the next.
        scaling: of their profiles, over the first dimension that varies.
    """

    signatures: tuple[Signature, ...]
    scaling: ProfileScaling

    @property
    def axis(self) -> int:
        """The dimension that is called the size: the first that varies."""
        first, last = self.signatures[0].dims, self.signatures[-1].dims
        return next(k for k, (a, b) in enumerate(zip(first, last, strict=True)) if a != b)

    @property
    def is_checked(self) -> bool:
        """Whether the profiles at the smaller sizes foretell the bytes at the largest: line or parabola, it goes on."""
        sizes, profiles = self.scaling.sizes, self.scaling.profiles
        if len(sizes) < 3:
            return False
        curved = len(sizes) > 3 and ProfileScaling(sizes=sizes[:-1], profiles=profiles[:-1]).bend > STRAIGHT
        return all(_extrapolated(sizes, values, curved=curved) for values in _totals(profiles))

    def at(self, size: int) -> Signature:
        """The signature at a size; dimensions between two whole numbers are rounded up."""
        first = self.signatures[0]
        over = size - first.dims[self.axis]
        return Signature(
            first.kind, tuple(math.ceil(d + over * s) for d, s in zip(first.dims, self._slopes, strict=True))
        )

    def expect(self, size: int, basis: Basis) -> Expected:
        """The profile to plan the signature at a size with."""
        ends = (self.scaling.sizes[0], max(size, self.scaling.sizes[-1]))
        least, most = (self.scaling.at(end).unplanned_peak_bytes for end in ends)
        spare_bytes = math.ceil(STRAIGHT * max(0, most - least))
        return Expected(profile=self.scaling.at(size), at=self.at(size), basis=basis, spare_bytes=spare_bytes)

    def size_of(self, signature: Signature) -> int | None:
        """The size at which the line goes through a signature; None where it does not."""
        first, size = self.signatures[0], signature.dims[self.axis]
        over = size - first.dims[self.axis]
        pairs = zip(first.dims, self._slopes, signature.dims, strict=True)
        return size if all(d + over * slope == wanted for d, slope, wanted in pairs) else None

    def covering(self, signature: Signature) -> int | None:
        """The smallest size, from the first one on, that covers the signature; None where none does."""
        first = self.signatures[0]
        least = first.dims[self.axis]
        size = least
        for d, slope, wanted in zip(first.dims, self._slopes, signature.dims, strict=True):
            if wanted > d and not slope:
                return None
            if wanted > d:
                size = max(size, least + math.ceil((wanted - d) / slope))
        return size

    @property
    def _slopes(self) -> list[Fraction]:
        """The rise of each dimension per unit of size."""
        first, last = self.signatures[0].dims, self.signatures[-1].dims
        whole = last[self.axis] - first[self.axis]
        return [Fraction(b - a, whole) for a, b in zip(first, last, strict=True)]


def _totals(profiles: Sequence[Profile]) -> list[list[int]]:
    held = [profile.stages[-1].forward.end_bytes for profile in profiles]
    return [held, [profile.unplanned_peak_bytes for profile in profiles]]


def _extrapolated(sizes: Sequence[int], values: Sequence[int], *, curved: bool) -> bool:
    expected = whole_at(sizes[:-1], values[:-1], sizes[-1], curved=curved)
    return abs(expected - values[-1]) <= STRAIGHT * abs(values[-1] - values[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The profile to plan a signature with.

    Attributes:
        profile: predicted, at ``at``.
        at: the signature itself, or one that covers it.
        basis: ``interpolated`` (between two profiled sizes), ``extrapolated`` (beyond them, where the fit was checked),
            or ``covered``: for a larger signature. Each tensor is no larger then than the plan counts with.
        spare_bytes: by how much the fit may be off, by the share of scaling that counts as none; 0 for a profile.
    """

    profile: Profile
    at: Signature
    basis: Basis
    spare_bytes: int = 0


def lines_of(profiled: Mapping[Signature, Profile]) -> tuple[SizeLine, ...]:
    """Every line through two or more profiled signatures, those through the most first."""
    lines: dict[frozenset[Signature], SizeLine] = {}
    for one, other in combinations(profiled, 2):
        pair = sorted((one, other), key=lambda signature: signature.dims)
        if not pair[1].covers(pair[0]):
            continue
        line = _line(pair, profiled)
        on = [s for s in profiled if s.kind == one.kind and line.size_of(s) is not None]
        if frozenset(on) not in lines:
            lines[frozenset(on)] = _line(sorted(on, key=lambda signature: signature.dims), profiled)
    return tuple(sorted(lines.values(), key=lambda line: -len(line.signatures)))


def _line(signatures: Sequence[Signature], profiled: Mapping[Signature, Profile]) -> SizeLine:
    first, last = signatures[0].dims, signatures[-1].dims
    axis = next(k for k, (a, b) in enumerate(zip(first, last, strict=True)) if a != b)
    sizes = tuple(signature.dims[axis] for signature in signatures)
    scaling = ProfileScaling(sizes=sizes, profiles=tuple(profiled[signature] for signature in signatures))
    return SizeLine(signatures=tuple(signatures), scaling=scaling)


def expected(lines: Sequence[SizeLine], profiled: Mapping[Signature, Profile], signature: Signature) -> Expected | None:
    """The profile to plan a signature with: on a line if it lies on one, else of the smallest known to cover it.

    Below the smallest size and above the largest a line counts only where it was checked.

    Raises:
        IncompatibleProfiles: the profiles do not have the same stages.
    """
    alike = [line for line in lines if line.signatures[0].kind == signature.kind]
    on = [(line, size) for line in alike if (size := line.size_of(signature)) is not None]
    for line, size in on:
        if line.scaling.sizes[0] <= size <= line.scaling.sizes[-1]:
            return line.expect(size, "interpolated")
    for line, size in on:
        if size > 0 and line.is_checked:
            return line.expect(size, "extrapolated")
    covers = [Expected(profile=p, at=s, basis="covered") for s, p in profiled.items() if s.covers(signature)]
    for line in alike:
        size = line.covering(signature)
        if size is not None and (size <= line.scaling.sizes[-1] or line.is_checked):
            covers.append(line.expect(size, "covered"))
    return min(covers, key=lambda cover: cover.profile.unplanned_peak_bytes, default=None)
