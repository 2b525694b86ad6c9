"""Where CUDA's caching allocator puts tensors: the blocks that it hands out, and the memory that it holds for them.

After ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h`` of PyTorch 2.13, for one stream and with
the default settings. A request is rounded up and takes the smallest free block that is large enough. What the block has
beyond the request is split off if that is worth it, and free neighbors are joined again. Where no block is large
enough, the allocator takes a new segment from the device, and keeps it. With ``expandable_segments:True`` there is one
segment for small requests and one for large ones, which have memory by pages. Where the device has no memory left, the
allocator first gives back whole segments, or pages, that are free.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

_MIB = 2**20
_LEAST_BLOCK_BYTES = 512
_MOST_SMALL_BYTES = _MIB  # Larger requests have segments of their own kind.
_SMALL_SEGMENT_BYTES, _LARGE_SEGMENT_BYTES = 2 * _MIB, 20 * _MIB
_LEAST_OWN_SEGMENT_BYTES, _OWN_SEGMENT_STEP_BYTES = 10 * _MIB, 2 * _MIB


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A part of a segment, and its neighbors there."""

    address: int
    size_bytes: int
    pool: _Pool
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    free: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.size_bytes, self.address


class _Pool:
    """The free blocks of small or of large requests, by size and address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page_bytes = _SMALL_SEGMENT_BYTES if small else _LARGE_SEGMENT_BYTES
        self.mapped: set[int] = set()  # pages of an expandable segment that have memory
        self.last: MemoryBlock | None = None  # of an expandable segment
        self._order: list[tuple[int, int]] = []
        self._blocks: list[MemoryBlock] = []

    def add(self, block: MemoryBlock) -> None:
        block.free = True
        place = bisect.bisect_left(self._order, block.order)
        self._order.insert(place, block.order)
        self._blocks.insert(place, block)

    def remove(self, block: MemoryBlock) -> None:
        block.free = False
        place = bisect.bisect_left(self._order, block.order)
        del self._order[place], self._blocks[place]

    def whole_segments(self) -> list[MemoryBlock]:
        """Returns the free blocks that are all of their segment."""
        return [block for block in self._blocks if block.before is None and block.after is None]

    def smallest(self, size_bytes: int) -> MemoryBlock | None:
        """Returns the smallest free block of at least so many bytes; the one that can grow if there is no other."""
        place = bisect.bisect_left(self._order, (size_bytes, -1))
        fitting = self._blocks[place : place + 2]
        return next((block for block in fitting if block is not self.last), fitting[0] if fitting else None)


def _pages(block: MemoryBlock) -> set[int]:
    """Returns the numbers of the pages on which a block lies."""
    page_bytes = block.pool.page_bytes
    return set(range(block.address // page_bytes, -(-(block.address + block.size_bytes) // page_bytes)))


class CudaAllocator:
    """The blocks and segments of a device.

    Args:
        expandable: as with ``expandable_segments:True``.
        capacity_bytes: that the device has for segments; None for a device without limits.

    Attributes:
        allocated_bytes, peak_allocated_bytes: of the blocks that are handed out, as ``torch.cuda.memory_allocated``.
        reserved_bytes, peak_reserved_bytes: of all segments, as ``torch.cuda.memory_reserved``.
        flushes: how often the device had no memory left, and what was free was given back.
        short_bytes: the most that was missing after that: above 0, the device runs out of memory.
    """

    def __init__(self, *, expandable: bool = False, capacity_bytes: int | None = None) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.reserved_bytes = self.peak_reserved_bytes = 0
        self.flushes = self.short_bytes = 0
        self._expandable = expandable
        self._capacity_bytes = capacity_bytes
        self._handed_out: set[MemoryBlock] = set()
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._next_address = 0

    def allocate(self, size_bytes: int) -> MemoryBlock | None:
        """Returns the block for a tensor; None for one without bytes."""
        if not size_bytes:
            return None
        rounded_bytes = -(-size_bytes // _LEAST_BLOCK_BYTES) * _LEAST_BLOCK_BYTES
        pool = self._small if rounded_bytes <= _MOST_SMALL_BYTES else self._large
        block = pool.smallest(rounded_bytes)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grown(pool, rounded_bytes) if self._expandable else self._segment(pool, rounded_bytes)
        self._split(block, rounded_bytes)
        self._handed_out.add(block)
        if self._expandable:
            self._map(block)
        self.allocated_bytes += block.size_bytes
        self.note_peak(self.allocated_bytes)
        return block

    def free(self, block: MemoryBlock | None) -> None:
        """Takes a block back, and joins it with the free ones beside it."""
        if block is None:
            return
        self.allocated_bytes -= block.size_bytes
        self._handed_out.remove(block)
        for neighbor in (block.before, block.after):
            if neighbor is not None and neighbor.free:
                block.pool.remove(neighbor)
                self._join(block, neighbor)
        block.pool.add(block)

    def note_peak(self, allocated_bytes: int) -> None:
        """So many bytes were handed out at once."""
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated_bytes)

    def forget_peak(self) -> None:
        """The most bytes handed out are those of now."""
        self.peak_allocated_bytes = self.allocated_bytes

    def _segment(self, pool: _Pool, size_bytes: int) -> MemoryBlock:
        if pool.small:
            taken_bytes = _SMALL_SEGMENT_BYTES
        elif size_bytes < _LEAST_OWN_SEGMENT_BYTES:
            taken_bytes = _LARGE_SEGMENT_BYTES
        else:
            taken_bytes = -(-size_bytes // _OWN_SEGMENT_STEP_BYTES) * _OWN_SEGMENT_STEP_BYTES
        self._reserve(taken_bytes)
        self._next_address += taken_bytes
        return MemoryBlock(self._next_address - taken_bytes, taken_bytes, pool)

    def _grown(self, pool: _Pool, size_bytes: int) -> MemoryBlock:
        """The end of an expandable segment, which grows by as many pages as are missing."""
        last = pool.last
        end = (
            MemoryBlock(0, 0, pool)
            if last is None
            else MemoryBlock(last.address + last.size_bytes, 0, pool, before=last)
        )
        if last is not None:
            last.after = end
            if last.free:
                pool.remove(last)
                self._join(end, last)
        missing_bytes = -(-(size_bytes - end.size_bytes) // pool.page_bytes) * pool.page_bytes
        end.size_bytes += missing_bytes
        pool.last = end
        return end

    def _map(self, block: MemoryBlock) -> None:
        """Gives memory to the pages of an expandable segment on which a block lies."""
        missing = _pages(block) - block.pool.mapped
        if missing:
            self._reserve(len(missing) * block.pool.page_bytes)
            block.pool.mapped |= missing

    def _reserve(self, size_bytes: int) -> None:
        capacity_bytes = self._capacity_bytes
        if capacity_bytes is not None and self.reserved_bytes + size_bytes > capacity_bytes:
            self.flushes += 1
            self._give_back()
            self.short_bytes = max(self.short_bytes, self.reserved_bytes + size_bytes - capacity_bytes)
        self.reserved_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _give_back(self) -> None:
        """Gives free segments back to the device, or the free pages of expandable ones."""
        for pool in (self._small, self._large):
            if self._expandable:
                used = set[int]().union(*(_pages(block) for block in self._handed_out if block.pool is pool))
                self.reserved_bytes -= len(pool.mapped - used) * pool.page_bytes
                pool.mapped &= used
            else:
                for block in pool.whole_segments():
                    pool.remove(block)
                    self.reserved_bytes -= block.size_bytes

    def _split(self, block: MemoryBlock, size_bytes: int) -> None:
        """Leaves what a block has beyond the request free, where that is enough for another one of its pool."""
        left_bytes = block.size_bytes - size_bytes
        worth_it = left_bytes >= _LEAST_BLOCK_BYTES if block.pool.small or self._expandable else left_bytes > _MIB
        if not worth_it:
            return
        rest = MemoryBlock(block.address + size_bytes, left_bytes, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.size_bytes, block.after = size_bytes, rest
        if block.pool.last is block:
            block.pool.last = rest
        block.pool.add(rest)

    def _join(self, block: MemoryBlock, neighbor: MemoryBlock) -> None:
        """Makes one block of two that lie side by side."""
        if neighbor is block.before:
            block.address, block.before = neighbor.address, neighbor.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbor.after
            if block.after is not None:
                block.after.before = block
        block.size_bytes += neighbor.size_bytes
        if block.pool.last is neighbor:
            block.pool.last = block
