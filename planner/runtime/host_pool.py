"""Host memory: which spans of one buffer, allocated once, hold what has been sent from the device."""

from __future__ import annotations

import bisect
from collections import deque
from typing import NamedTuple

from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class HostBlock(NamedTuple):
    """Bytes ``begin`` to ``end - 1`` of the buffer."""

    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


Spans = tuple[HostBlock, ...]


class HostPool:
    """Hands out spans of a buffer of ``size_bytes`` and takes them back.

    What is asked for is given in one span where one is long enough, else in several: as long as that many bytes are
    free they are found, whatever the sizes before.

    Args:
        size_bytes: of the buffer.
        granule_bytes: spans begin and end at multiples of it.

    >>> memory = HostPool(8)
    >>> held = [memory.take(2) for _ in range(4)]
    >>> memory.give(held[0]), memory.give(held[2]), memory.take(3)
    (None, None, (HostBlock(begin=0, end=2), HostBlock(begin=4, end=5)))
    """

    def __init__(self, size_bytes: int, granule_bytes: int = 1) -> None:
        self._granule_bytes = granule_bytes
        self.size_bytes = self._rounded(size_bytes)
        self.peak_bytes = 0
        self._free: list[HostBlock] = [HostBlock(0, self.size_bytes)] if size_bytes else []
        # Whoever holds spans may be let go of at any moment, also in the middle of ``take``.
        self._returned: deque[Spans] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes that are handed out."""
        self._absorb()
        return self.size_bytes - sum(span.size_bytes for span in self._free)

    def take(self, size_bytes: int) -> Spans | None:
        """Spans of so many bytes in all; None where fewer are free."""
        wanted = self._rounded(size_bytes)
        if wanted > self.size_bytes - self.held_bytes:
            return None
        found: list[HostBlock] = []
        while wanted:
            span = min((s for s in self._free if s.size_bytes >= wanted), key=_size, default=None)
            span = span or max(self._free, key=_size)
            found.append(self._cut(span, wanted))
            wanted -= found[-1].size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return tuple(found)

    def give(self, spans: Spans) -> None:
        """Take spans back."""
        self._returned.append(spans)

    def _rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self._granule_bytes) * self._granule_bytes

    def _cut(self, span: HostBlock, most_bytes: int) -> HostBlock:
        """The first bytes of a free span."""
        position = self._free.index(span)
        end = min(span.end, span.begin + most_bytes)
        self._free[position : position + 1] = [HostBlock(end, span.end)] if end < span.end else []
        return HostBlock(span.begin, end)

    def _absorb(self) -> None:
        while self._returned:
            for span in self._returned.popleft():
                self._insert(span)

    def _insert(self, span: HostBlock) -> None:
        """Add a free span, as one with those beside it."""
        position = bisect.bisect(self._free, span)
        if position < len(self._free) and self._free[position].begin == span.end:
            span = HostBlock(span.begin, self._free.pop(position).end)
        if position and self._free[position - 1].end == span.begin:
            position -= 1
            span = HostBlock(self._free.pop(position).begin, span.end)
        self._free.insert(position, span)


def _size(span: HostBlock) -> int:
    return span.size_bytes
