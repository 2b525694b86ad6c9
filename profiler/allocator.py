"""The device's caching allocator: what it holds beside the tensors that are alive."""

from __future__ import annotations

import torch


def release_cache(device: torch.device) -> None:
    """Give what the allocator holds and no tensor uses back to the device; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reserved_for(device: torch.device, peak_bytes: int) -> int | None:
    """Most bytes held at once since the peak was last reset, other tensors than the step's left out; None on the CPU.

    Args:
        device: of the step.
        peak_bytes: of the step, in the same stretch of time.
    """
    if device.type != "cuda":
        return None
    wasted = torch.cuda.max_memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return peak_bytes + wasted


def has_expandable_segments() -> bool:
    """Whether the CUDA allocator grows its segments, as one of them shows that is there now."""
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
