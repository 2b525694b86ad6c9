"""Where CUDA's allocator puts tensors: cases worked out by hand from its rules, and what holds of any sequence."""

from __future__ import annotations

import itertools
import random

import pytest

from profiler.simulation.cuda_allocator import CudaAllocator, MemoryBlock

KIB, MIB = 2**10, 2**20


def held(allocator: CudaAllocator) -> tuple[float, float]:
    """MiB handed out, and MiB of the device."""
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


def mib(allocator: CudaAllocator, size: float) -> MemoryBlock | None:
    return allocator.allocate(round(size * MIB))


def test_requests_are_rounded_to_512_bytes_and_small_ones_share_segments_of_2_mib() -> None:
    allocator = CudaAllocator()
    assert allocator.allocate(0) is None
    first, second = allocator.allocate(1), allocator.allocate(513)
    assert first is not None and second is not None
    assert (first.size_bytes, second.size_bytes) == (512, 1024)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (1536, 2 * MIB)
    mib(allocator, 1)  # The largest small one still fits.
    assert held(allocator)[1] == 2
    mib(allocator, 1)
    assert held(allocator)[1] == 4


def test_large_requests_share_segments_of_20_mib_up_to_10_mib_and_have_their_own_above() -> None:
    allocator = CudaAllocator()
    mib(allocator, 5)
    assert held(allocator) == (5, 20)
    mib(allocator, 9.5)
    assert held(allocator) == (14.5, 20)
    mib(allocator, 11)  # 5.5 MiB are left of the first segment; a segment of its own is rounded up to 2 MiB.
    assert held(allocator) == (26.5, 32)  # 1 MiB beyond the request is not split off.


@pytest.mark.parametrize(("size", "allocated"), [(19, 20), (18.5, 18.5)])
def test_a_large_block_keeps_a_rest_of_up_to_a_mib(size: float, allocated: float) -> None:
    allocator = CudaAllocator()
    allocator.free(mib(allocator, 20))
    mib(allocator, size)
    assert held(allocator) == (allocated, 20)


def test_the_smallest_free_block_is_taken_and_neighbors_are_joined() -> None:
    allocator = CudaAllocator()
    blocks = [mib(allocator, 4) for _ in range(5)]
    assert held(allocator) == (20, 20)
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    mib(allocator, 5)  # 8 MiB are free, but not side by side.
    assert held(allocator)[1] == 40
    taken = mib(allocator, 4)
    assert taken is not None and taken.address == 0
    allocator.free(blocks[1])  # Now it lies beside the third.
    joined = mib(allocator, 8)
    assert joined is not None and joined.address == 4 * MIB
    assert held(allocator) == (4 * 3 + 8 + 5, 40)


def test_free_segments_of_other_sizes_are_of_no_use_unless_they_can_expand() -> None:
    def growing(allocator: CudaAllocator) -> float:
        for size in (30, 60, 90):
            allocator.free(mib(allocator, size))
        return held(allocator)[1]

    assert growing(CudaAllocator()) == 30 + 60 + 90
    assert growing(CudaAllocator(expandable=True)) == 100  # pages of 20 MiB


def test_what_can_expand_is_used_last() -> None:
    allocator = CudaAllocator(expandable=True)
    first = mib(allocator, 9)
    mib(allocator, 4)  # 7 MiB are left of the page.
    allocator.free(first)
    taken = mib(allocator, 6)
    assert taken is not None and taken.address == 0
    mib(allocator, 12)  # 5 MiB are missing: another page
    assert held(allocator) == (22, 40)
    mib(allocator, 15)
    assert held(allocator) == (37, 40)


def test_a_device_without_memory_left_gets_free_segments_or_pages_back() -> None:
    def tight(*, expandable: bool) -> CudaAllocator:
        allocator = CudaAllocator(expandable=expandable, capacity_bytes=100 * MIB)
        freed, kept = mib(allocator, 30), mib(allocator, 30)
        allocator.free(freed)
        half = mib(allocator, 14)
        assert kept is not None and half is not None and half.address == 0
        mib(allocator, 50)
        return allocator

    # 30 MiB for 14, 30 and 50: the first segment is in use, and not enough is left.
    default = tight(expandable=False)
    assert (default.flushes, default.short_bytes / MIB) == (1, 10)
    # Pages of 20 MiB: 14 lies on the first, 30 on the next two, 50 on the rest of the third and three others.
    expandable = tight(expandable=True)
    assert (expandable.flushes, expandable.short_bytes / MIB, expandable.reserved_bytes / MIB) == (1, 20, 120)
    other = CudaAllocator(capacity_bytes=50 * MIB)
    other.free(mib(other, 30))
    mib(other, 40)
    assert (other.flushes, other.short_bytes, held(other), other.peak_reserved_bytes) == (1, 0, (40, 40), 40 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_lie_apart_and_all_memory_can_be_used_again(expandable: bool, seed: int) -> None:
    draw, allocator = random.Random(seed), CudaAllocator(expandable=expandable)
    alive: list[tuple[MemoryBlock, int]] = []
    for _ in range(400):
        if alive and draw.random() < 0.45:
            allocator.free(alive.pop(draw.randrange(len(alive)))[0])
        else:
            size_bytes = int(2 ** draw.uniform(0, 26))
            block = allocator.allocate(size_bytes)
            assert block is not None and block.size_bytes >= size_bytes
            alive.append((block, size_bytes))
        for pool in {block.pool for block, _ in alive}:
            spans = sorted((b.address, b.address + b.size_bytes) for b, _ in alive if b.pool is pool)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert allocator.allocated_bytes == sum(block.size_bytes for block, _ in alive) <= allocator.reserved_bytes
    reserved_bytes = allocator.reserved_bytes
    for block, _ in alive:
        allocator.free(block)
    assert allocator.allocated_bytes == 0 and allocator.reserved_bytes == reserved_bytes
    for size_bytes in (MIB, 20 * MIB):  # Free segments are whole again.
        allocator.allocate(size_bytes)
    assert allocator.reserved_bytes == reserved_bytes
