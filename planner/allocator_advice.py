"""Advice on the CUDA allocator, from what it held beside the tensors of a step."""

from __future__ import annotations

from planner.sizes import format_bytes

# A choice, not a measurement: below it a headroom of the same size costs less than changing how memory is mapped.
FRAGMENTED_SHARE = 0.1
SETTING = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def advice_on_allocator(peak_bytes: int, reserved_bytes: int | None, *, expandable: bool) -> str:
    """What to change where the allocator wastes more than a tenth of what it holds; empty where nothing.

    Args:
        peak_bytes: of the step.
        reserved_bytes: held for it; None on the CPU.
        expandable: whether segments are expandable already.

    >>> advice_on_allocator(95, 100, expandable=False)
    ''
    """
    if reserved_bytes is None or expandable or reserved_bytes - peak_bytes <= FRAGMENTED_SHARE * reserved_bytes:
        return ""
    wasted = reserved_bytes - peak_bytes
    return (
        f"the allocator holds {format_bytes(wasted)} that no tensor uses, {wasted / reserved_bytes:.0%} of what it has "
        f"reserved: set {SETTING} in the environment before Python starts (torch still reads the older name "
        "PYTORCH_CUDA_ALLOC_CONF, too) and measure again"
    )
