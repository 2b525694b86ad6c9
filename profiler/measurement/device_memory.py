"""Memory outside of tensors: what allocators hold, page faults, and what a process may still take of the host's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
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


class _GroupFiles(NamedTuple):
    """What a version of control groups calls the files of its limit and usage, and pages of files in its statistics."""

    limit: str
    usage: str
    pages_of_files: tuple[str, str]


_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = _GroupFiles("memory.max", "memory.current", ("inactive_file", "active_file"))


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still take: free on the machine, and allowed by its control groups.

    Other programs may take them first.

    Args:
        root: of the file system that tells of control groups.
    """
    allowed = [_allowed_bytes(group, files) for group, files in _groups(root)]
    return min([psutil.virtual_memory().available, *(size for size in allowed if size is not None)])


def _groups(root: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """The folder of each control group that this process is in, of both versions."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = root / "sys/fs/cgroup" / controllers
            inner = base / path.strip("/")
            for group in (inner, *(parent for parent in inner.parents if parent.is_relative_to(base))):
                yield group, _VERSION_1 if controllers else _VERSION_2


def _allowed_bytes(group: Path, files: _GroupFiles) -> int | None:
    """What a group leaves; None where it has no limit ("max"). Pages of files count as used, and go where needed."""
    most, used = _read(group / files.limit).strip(), _read(group / files.usage).strip()
    if not (most.isdigit() and used.isdigit()):
        return None
    pages = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines())
    needed = int(used) - sum(int(pages.get(name, 0)) for name in files.pages_of_files)
    return max(0, int(most) - max(0, needed))


def _read(path: Path) -> str:
    """A file's text; empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
