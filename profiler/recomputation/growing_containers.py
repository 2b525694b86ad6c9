"""Long lists and dicts that modules keep: a call makes them grow at their end, and a second run finds them short."""

from __future__ import annotations

from typing import Any

from profiler.recomputation.saved_tensors import RerunError
from profiler.workload.plain_objects import base_of


class GrowingContainer:
    """A list or dict of too many items to be copied, as it is before a first run: how long, and both its ends.

    Args:
        name: of the attribute, for messages.
        container: with an item at least.
    """

    __slots__ = ("_base", "_container", "_ends", "_length", "_name")

    def __init__(self, name: str, container: Any) -> None:
        self._name, self._container, self._length = name, container, len(container)
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
        if len(self._container) != self._length:
            return False
        first, last = self._first_and_last()
        return first is self._ends[0] and last is self._ends[1]

    def cut(self) -> list[Any]:
        """Make it as long as it was; returns what came since, for ``extend_again``.

        Raises:
            RerunError: more has changed than that it grew.
        """
        first, last = self._first_and_last() if len(self._container) >= self._length else (None, None)
        if len(self._container) < self._length or first is not self._ends[0] or last is not self._ends[1]:
            kind = type(self._container).__name__
            raise RerunError(
                f"expected {self._name!r}, a {kind} of {self._length} items, only to grow at its end, got one that "
                "lost or replaced some; keep fewer items in it, use a collections.deque, or keep this stage"
            )
        return self._tail()

    def extend_again(self, tail: list[Any]) -> None:
        """Make it hold what it was cut off, in the place of what came meanwhile."""
        self._tail()
        if self._base is list:
            list.extend(self._container, tail)
            return
        for key, value in tail:
            self._base.__setitem__(self._container, key, value)

    def _tail(self) -> list[Any]:
        if self._base is list:
            tail = list.__getitem__(self._container, slice(self._length, None))
            list.__delitem__(self._container, slice(self._length, None))
            return tail
        added = [self._base.popitem(self._container) for _ in range(len(self._container) - self._length)]
        return added[::-1]
