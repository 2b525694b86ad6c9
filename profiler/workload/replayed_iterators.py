"""Iterators that a step takes from: while it is measured each step gets the same items, and training gets them again.

``next(batches)`` uses up an item, and no generator and no iterator of itertools or of a DataLoader can be set back. So
where one is held (a variable, an attribute, a container) another one stands, which remembers what is taken from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from profiler.messages import warn_caller
from profiler.workload.random_states import RandomState


def _moved(random: RandomState) -> bool:
    return random.host_differs() or random.torch_differs()


class _Item:
    """A taken item: a value, or the end; with the random states before and after, where it drew numbers."""

    def __init__(
        self, value: Any, put_back: Callable[[], object], drew: tuple[RandomState, RandomState] | None
    ) -> None:
        self.value, self.put_back, self._drew = value, put_back, drew

    def draw(self) -> None:
        """Advance the random states as taking it did, where they are as they were then."""
        if self._drew is not None and not _moved(self._drew[0]):
            self._drew[1].restore()


class ReplayedIterator:
    """Stands in the place of an iterator.

    Args:
        source: the iterator that it takes from.
        shared: whether others hold the source, too, who would miss what is taken here.
    """

    def __init__(self, source: Any, *, shared: bool) -> None:
        self.source, self._shared = source, shared
        self._items: list[_Item] = []
        self._position = 0
        self._starts: list[int] = []  # of the measurements under way, one inside the other
        self._remember: Any = None

    def begin(self, remember: Callable[[Any], Callable[[], object]]) -> None:
        """Remembers items from now on; ``remember`` returns the function that restores the contents of a value."""
        self._starts.append(self._position)
        self._remember = remember

    def rewind(self) -> None:
        """A step begins: it gets the items that the one before got, as they were."""
        self._position = self._starts[-1]
        for item in self._items[self._position :]:
            item.put_back()

    def end(self) -> bool:
        """Give what was taken since ``begin`` once more; whether there is anything."""
        self.rewind()
        self._starts.pop()
        return bool(self._items)

    @property
    def held(self) -> list[Any]:
        """Its contents: the source, and the items to be given again."""
        return [self.source, *(item.value for item in self._items)]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._position == len(self._items):
            if not self._starts:
                return next(self.source)
            self._take()
        item = self._items[self._position]
        if self._starts:
            self._position += 1
        else:
            del self._items[self._position]
        item.draw()
        return item.value

    def _take(self) -> None:
        if self._shared and not self._items:
            warn_caller(
                f"profile: the step takes items from a {type(self.source).__name__} that others hold, too: they will "
                "miss those that profiling takes; let the step alone hold the iterator, or give it a batch"
            )
        before = RandomState()
        value = next(self.source)  # The end, too, comes anew in each step.
        drew = (before, RandomState()) if _moved(before) else None
        if drew is not None:
            before.restore()  # As if it came from here: ``draw`` follows.
        self._items.append(_Item(value, self._remember(value), drew))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)
