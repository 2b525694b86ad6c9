"""Advice on allocators: CUDA's, which holds more than the tensors, and the CPU's, which may hold too little."""

from __future__ import annotations

import sys

from planner.units import counted, format_bytes
from profiler.measurement.device_memory import is_short

# A choice, not a measurement: below it a headroom of the same size costs less than changing how memory is mapped.
FRAGMENTED_SHARE = 0.1
SEGMENTS = ("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# Keeps what is freed, and little beside it. glibc, told not to give anything back, is as fast, but came to hold many
# times the tensors' bytes.
KEEPING = ("LD_PRELOAD", "libtcmalloc_minimal.so.4")


def advice_on_allocator(
    peak_bytes: int, reserved_bytes: int | None, *, expandable: bool, cache_flushes: int = 0
) -> str:
    """Advice where CUDA's allocator ran short, or wastes more than a tenth of the bytes that it holds; else empty.

    Args:
        peak_bytes: the most bytes alive in the step.
        reserved_bytes: bytes that the allocator held for it; None on the CPU.
        expandable: whether segments are expandable already.
        cache_flushes: how often the device had no memory left until cached blocks were given back.

    >>> advice_on_allocator(95, 100, expandable=False)
    ''
    """
    if reserved_bytes is not None and cache_flushes:
        held = f"{format_bytes(reserved_bytes)} for {format_bytes(peak_bytes)} of tensors"
        remedy = "" if expandable else f"set {'='.join(SEGMENTS)} in the environment before Python starts, or "
        return (
            f"the device had no memory left {counted(cache_flushes, 'time')} while the steps were measured, and the "
            f"allocator, which held {held}, gave back what it cached; steps wait for that, and the next ones may run "
            f"out of memory: {remedy}solve for a smaller budget"
        )
    if reserved_bytes is None or expandable or reserved_bytes - peak_bytes <= FRAGMENTED_SHARE * reserved_bytes:
        return ""
    wasted = reserved_bytes - peak_bytes
    return (
        f"the allocator holds {format_bytes(wasted)} that no tensor uses, {wasted / reserved_bytes:.0%} of what it has "
        f"reserved: set {'='.join(SEGMENTS)} in the environment before Python starts (torch still reads the older name "
        "PYTORCH_CUDA_ALLOC_CONF, too) and measure again"
    )


def advice_on_malloc(peak_bytes: int, faulted_bytes: int | None) -> str:
    """Advice where a step gets more memory anew from the system than its whole peak; empty where it does not.

    glibc maps every block above 32 MiB anew and unmaps it when it is freed (DEFAULT_MMAP_THRESHOLD_MAX of its
    malloc.c), and the system clears each page when it is first touched.

    Args:
        peak_bytes: the most bytes alive in the step.
        faulted_bytes: bytes that one step got anew; None on other devices than the CPU.

    >>> advice_on_malloc(100, 100)
    ''
    """
    if faulted_bytes is None or faulted_bytes <= peak_bytes or sys.platform != "linux":
        return ""
    if is_short(peak_bytes):
        return ""  # Where a limit binds, freed memory has to go back.
    return (
        f"each step gets {format_bytes(faulted_bytes)} of memory anew from the system, which has to clear it, since "
        "the allocator gives large tensors back at once: start Python with one that keeps them, such as tcmalloc "
        f"({'='.join(KEEPING)} in the environment; Debian's package libtcmalloc-minimal4), and measure again"
    )
