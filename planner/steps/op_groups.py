"""Ops that run one after the other, as one node of a graph problem.

Of the 918 ops of a GPT-2 with 12 layers many make masks, statistics and gradients of biases, or a tensor that the next
op alone reads. A solver that may run each of them again, or keep what it makes, gains nothing, and takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from profiler.step_graph import StepGraph, StepOp


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Ops that run together.

    Attributes:
        ops: ordinals of those that run as often as the group does, in their order; each alone reads what the one before
            it makes.
        once: ordinals of those that belong to its first run alone.
    """

    ops: list[int]
    once: list[int] = field(default_factory=list)

    @property
    def first_run(self) -> list[int]:
        """Ordinals of all its ops, in an order in which they can run."""
        return sorted([*self.ops, *self.once])


def small_storages(step: StepGraph, most_bytes: float) -> frozenset[int]:
    """The smallest storages that an op makes, as many as hold at most that many bytes together."""
    small: list[int] = []
    for storage in sorted((s for op in step.ops for s in op.makes), key=lambda s: step.storages[s].size_bytes):
        most_bytes -= step.storages[storage].size_bytes
        if most_bytes < 0:
            break
        small.append(storage)
    return frozenset(small)


def groups_of(step: StepGraph, small: frozenset[int]) -> list[OpGroup]:
    """All ops of a step, in groups whose order is one in which they can run.

    An op that makes small storages alone runs with the last of those whose results it reads, if what else it reads is
    alive then anyway. An op that alone reads what the op before it makes runs with that one, if it makes no more: who
    would keep the one result does better to keep the other.

    Args:
        step: its ops, in an order in which they can run.
        small: storages that always stay.
    """
    return _Grouping(step, small).groups


class _Grouping:
    """Goes through the ops in order.

    Attributes:
        groups: until now.
    """

    def __init__(self, step: StepGraph, small: frozenset[int]) -> None:
        self.groups: list[OpGroup] = []
        self._step, self._small = step, small
        self._place: dict[int, int] = {}  # by storage that of the group that makes it
        self._readers: dict[int, set[int]] = {}
        for ordinal, op in enumerate(step.ops):
            for storage in op.reads:
                self._readers.setdefault(storage, set()).add(ordinal)
        for ordinal, op in enumerate(step.ops):
            self._add(ordinal, op)

    def _add(self, ordinal: int, op: StepOp) -> None:
        place = self._beside(op)
        if place is not None:
            self.groups[place].once.append(ordinal)
        elif self.groups and self._continues(self.groups[-1], ordinal, op):
            place = len(self.groups) - 1
            self.groups[place].ops.append(ordinal)
        else:
            place = len(self.groups)
            self.groups.append(OpGroup(ops=[ordinal]))
        self._place.update(dict.fromkeys(op.makes, place))

    def _beside(self, op: StepOp) -> int | None:
        """The place of the group in whose first run alone an op may run."""
        known = self._place
        if (
            not self.groups
            or op.random
            or op.once_reason
            or not self._small.issuperset(op.makes)
            or not known.keys() >= set(op.reads)
        ):
            return None
        place = max((known[storage] for storage in op.reads), default=len(self.groups) - 1)
        last = self._step.ops[self.groups[place].ops[-1]]
        alive = {*last.reads, *last.makes}
        return place if last.side == op.side and alive.issuperset(self._large(op.reads)) else None

    def _continues(self, group: OpGroup, ordinal: int, op: StepOp) -> bool:
        last = self._step.ops[group.ops[-1]]
        made = self._large(last.makes)
        if last.side != op.side or last.once_reason or op.once_reason or not made or not self._large(op.makes):
            return False
        storages = [self._step.storages[s] for s in made]
        if any(storage.returned or storage.written or storage.gradient for storage in storages):
            return False
        if any(self._readers.get(s, set()) - {ordinal, *group.once} or s not in op.reads for s in made):
            return False
        if sum(storage.size_bytes for storage in storages) < self._bytes(op.makes):
            return False
        return self._as_large_together([*group.ops, ordinal])

    def _as_large_together(self, ordinals: list[int]) -> bool:
        """Whether ops that run together, all that they read being alive meanwhile, take no more than one by one."""
        ops = [self._step.ops[ordinal] for ordinal in ordinals]
        made = {s for op in ops for s in op.makes}
        read = [self._large(op.reads) - made for op in ops]
        everything = set[int]().union(*read)
        lasting = {s for s in everything if self._lasts(s, ordinals)}
        inside = inner_bytes(self._step, ordinals, self._small)
        one_by_one = [
            beside + self._bytes(lasting | (set[int]().union(*read[: k + 1]) & set[int]().union(*read[k:])))
            for k, beside in enumerate(inside)
        ]
        return max(inside) + self._bytes(everything) <= max(one_by_one)

    def _lasts(self, storage: int, ordinals: list[int]) -> bool:
        """Whether a storage of the same side is read after these ops as well, or made there for a later one of them."""
        side = self._step.ops[ordinals[0]].side
        place = self._place.get(storage)
        if place is None or self._step.ops[self.groups[place].ops[0]].side != side:
            return False
        later = [reader for reader in self._readers[storage] if reader >= ordinals[-1]]
        return any(self._step.ops[reader].side == side for reader in later)

    def _large(self, storages: Iterable[int]) -> set[int]:
        return {s for s in storages if s not in self._small}

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._step.storages[s].size_bytes for s in storages if s not in self._small)


def inner_bytes(step: StepGraph, ordinals: Sequence[int], small: frozenset[int]) -> list[int]:
    """The bytes during each op of a group, beside what the group reads and what always stays.

    An op that draws again holds the generator's own state meanwhile.
    """
    made = [sum(step.storages[s].size_bytes for s in step.ops[ordinal].makes if s not in small) for ordinal in ordinals]
    return [
        before + made_bytes + step.ops[ordinal].transient_bytes + step.ops[ordinal].state_bytes
        for before, made_bytes, ordinal in zip([0, *made], made, ordinals, strict=False)
    ]
