"""Profiles of signatures that were never profiled, expected from profiled ones that differ from them in one size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Literal

from planner.capacity.scaling import STRAIGHT, ProfileScaling, whole_at
from planner.training.input_signatures import Signature
from profiler.records import Profile

Basis = Literal["interpolated", "extrapolated", "covered"]


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
        """What to plan the signature at a size with."""
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
        """How much each dimension rises with the size."""
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
    """What to plan a signature with.

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
    """What to plan a signature with: on a line if it lies on one, else as the smallest that is known to cover it.

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
