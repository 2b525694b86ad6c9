"""Allocators: what CUDA's holds beside the tensors that are alive, and what the CPU's gets from the system anew."""

from __future__ import annotations

import sys

import torch

if sys.platform != "win32":
    import resource


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


def faulted_bytes(device: torch.device) -> int | None:
    """Bytes that the system has given to this process until now, a page fault each; None where nothing counts them.

    A large page counts as a small one: what is cleared in one go costs little.
    """
    if device.type != "cpu" or sys.platform == "win32":
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * resource.getpagesize()


def has_expandable_segments() -> bool:
    """Whether the CUDA allocator grows its segments, as one of them shows that is there now."""
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
