"""The host memory of a plan: one buffer, allocated once, of which blocks are handed out and taken back."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from operator import attrgetter
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


HostBlocks = tuple[HostBlock, ...]


class HostPool:
    """Hands out blocks of a buffer of ``size_bytes`` and takes them back.

    What is asked for is given in one block where one is long enough, else in several: as long as that many bytes are
    free they are given, whatever the sizes before.

    Args:
        size_bytes: of the buffer.
        granule_bytes: blocks begin and end at multiples of it.

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
        # Whoever holds blocks may be let go of at any moment, also in the middle of ``take``.
        self._returned: deque[HostBlocks] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes that are handed out."""
        self._absorb()
        return self.size_bytes - sum(block.size_bytes for block in self._free)

    def take(self, size_bytes: int) -> HostBlocks | None:
        """Blocks of so many bytes in all; None where fewer are free."""
        wanted_bytes = self._rounded(size_bytes)
        if wanted_bytes > self.size_bytes - self.held_bytes:
            return None
        blocks: list[HostBlock] = []
        size = attrgetter("size_bytes")
        while wanted_bytes:
            large_enough = (block for block in self._free if block.size_bytes >= wanted_bytes)
            free = min(large_enough, key=size, default=None) or max(self._free, key=size)
            blocks.append(self._cut(free, wanted_bytes))
            wanted_bytes -= blocks[-1].size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return tuple(blocks)

    def give(self, blocks: HostBlocks) -> None:
        """Take blocks back."""
        self._returned.append(blocks)

    def _rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // self._granule_bytes) * self._granule_bytes

    def _cut(self, free: HostBlock, most_bytes: int) -> HostBlock:
        """The first bytes of a free block."""
        position = self._free.index(free)
        end = min(free.end, free.begin + most_bytes)
        self._free[position : position + 1] = [HostBlock(end, free.end)] if end < free.end else []
        return HostBlock(free.begin, end)

    def _absorb(self) -> None:
        while self._returned:
            for block in self._returned.popleft():
                self._insert(block)

    def _insert(self, block: HostBlock) -> None:
        """Add a free block, as one with its neighbours."""
        position = bisect.bisect(self._free, block)
        if position < len(self._free) and self._free[position].begin == block.end:
            block = HostBlock(block.begin, self._free.pop(position).end)
        if position and self._free[position - 1].end == block.begin:
            position -= 1
            block = HostBlock(self._free.pop(position).begin, block.end)
        self._free.insert(position, block)


def parts_of(blocks: HostBlocks, size_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Where the bytes of a row of ``size_bytes`` lie: for each block its part of the buffer, and that of the row."""
    offset = 0
    for begin, end in blocks:
        length = min(end - begin, size_bytes - offset)
        yield slice(begin, begin + length), slice(offset, offset + length)
        offset += length
