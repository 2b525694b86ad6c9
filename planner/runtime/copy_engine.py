"""What the runtime asks of a copy engine, which copies bytes between device and host memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class PendingFetch(Protocol):
    """A copy on its way back to the device."""

    def wait(self) -> Tensor:
        """The bytes on the device; computation waits until they have arrived.

        The host memory is given back then, unless it was to be kept.
        """
        ...


class OffloadedCopy(Protocol):
    """A copy on its way to host memory, or there.

    Whoever lets go of it gives the host memory back; what is under way until then is waited for by the computation,
    not by the caller.
    """

    def wait(self) -> None:
        """Let the computation wait until the copy is done: what it was made of may go from then on."""
        ...

    def fetch(self, *, keep: bool = False) -> PendingFetch:
        """Take memory on the device and begin to copy back into it; ``keep`` what is in host memory, for others."""
        ...


class CopyEngine(Protocol):
    """Copies in both directions, in each in the order asked for, while the computation goes on."""

    def send(self, source: Tensor) -> OffloadedCopy | None:
        """Begin to copy ``source``, one row of bytes, to host memory; None where that is full."""
        ...


def bytes_of(tensor: Tensor) -> Tensor:
    """The storage under a tensor as one row of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def empty_bytes(size_bytes: int, device: torch.device) -> Tensor:
    """New memory on the device, as one row of bytes."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)
