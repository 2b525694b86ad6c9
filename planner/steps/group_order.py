"""The order of a step's first runs: groups of ops moved, within forward and within backward, to where less is alive.

A weight's gradient that comes before its input's lets go of an activation before the next gradient is made; a mask that
is made where it is first read is not alive before. Local search: a move is made where it leaves no other run with more
bytes alive, some with fewer, and the moved run with no more than the highest it passes. What a group reads comes before
it, and what draws random numbers or must run once stays in its order.

Computing optimal orders is hard for general graphs: Sethi, "Complete register allocation problems", 1975.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.steps.op_groups import OpGroup, inner_bytes
from profiler.step_graph import Side, StepGraph

PASSES = 4
FURTHEST = 200  # places that a group moves at once: what reads the same tensors is near


def moved_groups(step: StepGraph, groups: Sequence[OpGroup], small: frozenset[int]) -> list[OpGroup]:
    """Groups in an order that holds fewer bytes where each runs once, or as they come.

    Args:
        step: of the groups.
        groups: in an order in which they can run, those of forward first.
        small: storages that always stay.
    """
    gradients = {s for s, storage in enumerate(step.storages) if storage.gradient}
    handed = {s for op in step.ops if op.side == "backward" for s in op.reads}
    left = {s for s, storage in enumerate(step.storages) if storage.returned or storage.written}
    ends: dict[Side, set[int]] = {"forward": left | handed, "backward": gradients}
    moved: list[OpGroup] = []
    for side, lasting in ends.items():
        of_side = [group for group in groups if step.ops[group.ops[0]].side == side]
        moved += _SideOrder(step, of_side, small, lasting).moved()
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A group as the search sees it, without what is small.

    Attributes:
        reads: storages that others make.
        made_bytes, beside_bytes: of what it leaves, and the most that it takes beside that while it runs.
        before: numbers of the items that come before it.
    """

    reads: frozenset[int]
    made_bytes: int
    beside_bytes: int
    before: frozenset[int]


class _SideOrder:
    """The groups of a side in an order that changes: a group has a number and, for the time being, a place."""

    def __init__(
        self, step: StepGraph, groups: Sequence[OpGroup], small: frozenset[int], ends: Collection[int]
    ) -> None:
        self._groups, self._sizes = groups, [storage.size_bytes for storage in step.storages]
        self._items = [*_items(step, groups, small, ends)]
        self._order = [*range(len(groups))]
        self._place = [*range(len(groups))]
        self._ends = frozenset(ends)
        self._readers: dict[int, list[int]] = {}
        self._after: list[list[int]] = [[] for _ in groups]
        for number, item in enumerate(self._items):
            for storage in item.reads:
                self._readers.setdefault(storage, []).append(number)
            for other in item.before:
                self._after[other].append(number)
        self._alive = self._alive_bytes()

    def moved(self) -> list[OpGroup]:
        """The groups after the search."""
        for _ in range(PASSES):
            if not sum(self._earlier(number) or self._later(number) for number in range(len(self._items))):
                break
        return [self._groups[number] for number in self._order]

    def _alive_bytes(self) -> list[int]:
        """Bytes alive before each place, and at the end, above those that the side begins with."""
        changes = [0] * (len(self._items) + 1)
        for number, item in enumerate(self._items):
            changes[number + 1] += item.made_bytes
        for storage, readers in self._readers.items():
            if storage not in self._ends:
                changes[readers[-1] + 1] -= self._sizes[storage]
        return [*itertools.accumulate(changes)]

    def _earlier(self, number: int) -> bool:
        """Move a group to the earliest place that takes from all runs which it passes, if there is any."""
        item, place = self._items[number], self._place[number]
        first = max((self._place[other] + 1 for other in item.before), default=0)
        freed = _Falling((last, self._sizes[s]) for s, last in self._lasts(number) if last < place)
        if freed.before(place - 1) <= item.made_bytes:
            return False
        target, highest = place, self._peak(place)
        for at in range(place - 1, max(first, place - FURTHEST) - 1, -1):
            if freed.before(at) < item.made_bytes:
                break
            highest = max(highest, self._peak(at))
            if self._alive[at] + item.made_bytes + item.beside_bytes <= highest:
                target = at
        if target == place:
            return False
        after = [self._alive[at] + item.made_bytes - freed.before(at) for at in range(target, place)]
        self._alive[target + 1 : place + 1] = after
        self._put(number, target)
        return True

    def _later(self, number: int) -> bool:
        """Move a group to the latest place that takes from all runs which pass it, if there is any."""
        item, place = self._items[number], self._place[number]
        end = min((self._place[other] - 1 for other in self._after[number]), default=len(self._order) - 1)
        held = _Falling((last, self._sizes[s]) for s, last in self._lasts(number))
        if held.before(place + 1) >= item.made_bytes:
            return False
        target, highest = place, self._peak(place)
        for at in range(place + 1, min(end, place + FURTHEST) + 1):
            if held.before(at) > item.made_bytes:
                break
            highest = max(highest, self._peak(at))
            if self._alive[at + 1] + held.before(at + 1) + item.beside_bytes <= highest:
                target = at
        if target == place:
            return False
        after = [self._alive[at] - item.made_bytes + held.before(at) for at in range(place + 1, target + 2)]
        self._alive[place : target + 1] = after
        self._put(number, target)
        return True

    def _lasts(self, number: int) -> Iterator[tuple[int, int]]:
        """Storages that a group reads and that are let go of, with the last place at which another one reads them."""
        for storage in self._items[number].reads - self._ends:
            others = (self._place[reader] for reader in self._readers[storage] if reader != number)
            yield storage, max(others, default=-1)

    def _peak(self, place: int) -> int:
        item = self._items[self._order[place]]
        return self._alive[place] + item.made_bytes + item.beside_bytes

    def _put(self, number: int, target: int) -> None:
        place = self._place[number]
        self._order.insert(target, self._order.pop(place))
        for changed in range(min(place, target), max(place, target) + 1):
            self._place[self._order[changed]] = changed


class _Falling:
    """Bytes of storages by the place of their last use."""

    def __init__(self, lasts: Iterable[tuple[int, int]]) -> None:
        self._lasts = [*lasts]

    def before(self, place: int) -> int:
        """Of those whose last use comes before a place."""
        return sum(size_bytes for last, size_bytes in self._lasts if last < place)


def _items(step: StepGraph, groups: Sequence[OpGroup], small: frozenset[int], ends: Collection[int]) -> Iterator[_Item]:
    used = {*ends, *(s for group in groups for ordinal in group.first_run for s in step.ops[ordinal].reads)}
    makers: dict[int, int] = {}
    fixed: list[int] = []
    for number, group in enumerate(groups):
        ops = [step.ops[ordinal] for ordinal in group.first_run]
        inside = {s for op in ops for s in op.makes}
        read = {s for op in ops for s in op.reads} - inside
        before = {makers[s] for s in read if s in makers}
        if any(op.random or op.once_reason for op in ops):
            before.update(fixed[-1:])
            fixed.append(number)
        makers.update(dict.fromkeys(inside, number))
        left = (used & set(step.ops[group.ops[-1]].makes)) - small
        made_bytes = sum(step.storages[s].size_bytes for s in left)
        beside = [step.ops[ordinal].transient_bytes for ordinal in group.once]
        beside += [bytes_ - made_bytes for bytes_ in inner_bytes(step, group.ops, small)]
        yield _Item(
            reads=frozenset(read) - small,
            made_bytes=made_bytes,
            beside_bytes=max(0, *beside),
            before=frozenset(before),
        )
