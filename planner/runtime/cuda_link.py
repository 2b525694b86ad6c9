"""A copy engine of a CUDA device: a stream for each direction, and pinned host memory."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from planner.runtime.copy_engine import empty_bytes
from planner.runtime.host_pool import HostBlocks, HostPool, parts_of
from profiler.caller_warnings import warn_caller
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

_ALIGNED_BYTES = 512  # Pieces of host memory begin at multiples of it, as blocks on the device do.


class _Arrival(NamedTuple):
    """The end of a copy back, and how many had begun by then."""

    number: int
    event: torch.cuda.Event


class CudaCopyEngine:
    """Copies on side streams, into pinned memory that is allocated here, once.

    Each copy waits on its stream for what was computed before it was asked for; the computation's stream waits for the
    copy where its result is used, or its source is let go of. So neither end of a copy is used again by the allocator
    while the copy runs, and the host waits for nothing.

    Args:
        device: whose memory is copied.
        host_bytes: the most that is in host memory at once.
    """

    def __init__(self, device: torch.device, host_bytes: int) -> None:
        # All that the pinned allocator takes for so many bytes: there is room for pieces whose ends are rounded up.
        self.memory = HostPool(pinned_bytes(host_bytes), _ALIGNED_BYTES)
        self.bytes = host_buffer(self.memory.size_bytes)
        self.device = device
        self.to_host = torch.cuda.Stream(device)
        self.to_device = torch.cuda.Stream(device)
        # Copies back arrive in order: after the latest of those given back, all host memory given back is unread.
        self._given_back: _Arrival | None = None
        self._arrivals = 0

    def send(self, source: Tensor) -> CudaCopy | None:
        """Begin to copy one row of bytes to host memory; None where that is full."""
        blocks = self.memory.take(source.numel())
        if blocks is None:
            return None
        computing = torch.cuda.current_stream(self.device)
        copy = CudaCopy(self, source, blocks, computing)
        self.to_host.wait_stream(computing)
        if self._given_back is not None:
            self.to_host.wait_event(self._given_back.event)
        try:
            with torch.cuda.stream(self.to_host):
                for host, device in parts_of(blocks, source.numel()):
                    self.bytes[host].copy_(source[device], non_blocking=True)
        finally:
            copy.done = _recorded(self.to_host)
        return copy

    def arrival(self) -> _Arrival:
        """The end of the copy back that has been asked for last."""
        self._arrivals += 1
        return _Arrival(self._arrivals, _recorded(self.to_device))

    def give_back(self, blocks: HostBlocks, after: _Arrival | None) -> None:
        """Host memory is free again once ``after`` has happened."""
        if after is not None:
            self._given_back = max(after, self._given_back or after, key=lambda each: each.number)
        self.memory.give(blocks)


class CudaCopy:
    """A copy on the stream to host memory, with its source until the computation waits for it."""

    def __init__(
        self, engine: CudaCopyEngine, source: Tensor, blocks: HostBlocks, computing: torch.cuda.Stream
    ) -> None:
        self.done: torch.cuda.Event | None = None
        self._read: _Arrival | None = None
        self._engine = engine
        self._source: Tensor | None = source
        self._blocks = blocks
        self._size_bytes = source.numel()
        self._computing = computing

    def wait(self) -> None:
        """The computation waits for the copy."""
        _wait(self.done, self._computing, self._engine.device)
        self._source = None

    def fetch(self, *, keep: bool = False) -> CudaFetch:
        """Begin the copy back; ``keep`` what is in host memory, for others."""
        engine = self._engine
        computing = torch.cuda.current_stream(engine.device)
        fetch = CudaFetch(self, empty_bytes(self._size_bytes, engine.device), computing, keep=keep)
        engine.to_device.wait_stream(computing)  # Its memory may have been another tensor's, still in use there.
        if self.done is not None:
            engine.to_device.wait_event(self.done)
        try:
            with torch.cuda.stream(engine.to_device):
                for host, device in parts_of(self._blocks, self._size_bytes):
                    fetch.target[device].copy_(engine.bytes[host], non_blocking=True)
        finally:
            self._read = engine.arrival()
            fetch.arrived = self._read.event
        return fetch

    def give_back(self) -> None:
        """The host memory is free again once the last copy back has arrived."""
        blocks, self._blocks = self._blocks, ()
        if blocks:
            self._engine.give_back(blocks, self._read)

    @property
    def device(self) -> torch.device:
        return self._engine.device

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if self._source is not None and self.done is not None:
            self._computing.wait_event(self.done)  # Else its memory could be given to others while it is being read.
        self.give_back()


class CudaFetch:
    """A copy on the stream back to the device."""

    def __init__(self, copy: CudaCopy, target: Tensor, computing: torch.cuda.Stream, *, keep: bool) -> None:
        self.arrived: torch.cuda.Event | None = None
        self.target = target
        self._copy = copy
        self._computing = computing
        self._keep = keep
        self._waited = False

    def wait(self) -> Tensor:
        """The computation waits until the bytes have arrived."""
        _wait(self.arrived, self._computing, self._copy.device)
        self._waited = True
        if not self._keep:
            self._copy.give_back()
        return self.target

    def __del__(self) -> None:
        if self._waited or self.arrived is None or sys.is_finalizing():
            return
        self._computing.wait_event(self.arrived)  # Else its memory could be given to others while it is being written.
        if not self._keep:
            self._copy.give_back()


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _wait(event: torch.cuda.Event | None, computing: torch.cuda.Stream, device: torch.device) -> None:
    """The stream in use waits for an event, and so does the one whose memory it is about."""
    assert event is not None
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    if current != computing:
        computing.wait_event(event)


def pinned_bytes(size_bytes: int) -> int:
    """What torch's pinned allocator takes of the system for so many bytes: a power of two (CachingHostAllocator)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def host_buffer(size_bytes: int) -> Tensor:
    """Pinned host memory; where it cannot be had, other memory, with a warning."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warn_caller(
            f"offload: expected {size_bytes} bytes of pinned host memory, got none ({str(error).splitlines()[0]}); "
            "other memory is used: copies are several times slower and hold up the computation, so steps take longer "
            "than predicted. Allow less with --host-memory, or raise the limit on locked memory (ulimit -l)",
        )
        return torch.empty(size_bytes, dtype=torch.uint8)
