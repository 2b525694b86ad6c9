"""Copy engines: they copy rows of bytes to host memory and back, beside the computation.

One is of a CUDA device, one simulates a link on the CPU. Both send into one host buffer, allocated once; ``send``
returns None where that is full. A copy gives its host memory back once its fetch has arrived, or as it goes; whatever
is under way until then the computation waits for, not the caller.
"""

from __future__ import annotations

import bisect
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from profiler.messages import warn_caller
from profiler.recomputation.saved_tensors import tensor_over
from profiler.simulation.simulated_device import SimulatedDevice
from profiler.workload.compiled_forwards import leave_uncompiled
from solvers.problem.chain import Link

leave_uncompiled(__name__)


def bytes_of(tensor: Tensor) -> Tensor:
    """The storage under a tensor as one row of bytes."""
    storage = tensor.untyped_storage()
    return tensor_over(storage, ((storage.nbytes(),), (1,), 0, torch.uint8, False, False))


def empty_bytes(size_bytes: int, device: torch.device) -> Tensor:
    """New memory on the device, as one row of bytes."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


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
        size_bytes: length of the buffer.
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
    """Locates the bytes of a row of ``size_bytes``: for each block its part of the buffer, and that of the row."""
    offset = 0
    for begin, end in blocks:
        length = min(end - begin, size_bytes - offset)
        yield slice(begin, begin + length), slice(offset, offset + length)
        offset += length


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
        device: the device whose memory is copied.
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

    def fetch(self) -> CudaFetch:
        """Begin the copy back, into new memory of the device."""
        engine = self._engine
        computing = torch.cuda.current_stream(engine.device)
        fetch = CudaFetch(self, empty_bytes(self._size_bytes, engine.device), computing)
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

    def __init__(self, copy: CudaCopy, target: Tensor, computing: torch.cuda.Stream) -> None:
        self.arrived: torch.cuda.Event | None = None
        self.target = target
        self._copy = copy
        self._computing = computing
        self._waited = False

    def wait(self) -> Tensor:
        """The computation waits until the bytes have arrived."""
        _wait(self.arrived, self._computing, self._copy.device)
        self._waited = True
        self._copy.give_back()
        return self.target

    def __del__(self) -> None:
        if self._waited or self.arrived is None or sys.is_finalizing():
            return
        self._computing.wait_event(self.arrived)  # Else its memory could be given to others while it is being written.
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
    """Returns the bytes that torch's pinned allocator takes for so many: a power of two (CachingHostAllocator)."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes > 0 else 0


def host_buffer(size_bytes: int) -> Tensor:
    """Pinned host memory; where it cannot be had, other memory, with a warning."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warn_caller(
            f"offload: {size_bytes} bytes of pinned host memory could not be had ({str(error).splitlines()[0]}), so "
            "other memory is used: copies are several times slower and hold up the computation, and steps take longer "
            "than predicted. Allow less host memory (--offload host=B), or raise the limit on locked memory (ulimit "
            "-l)",
        )
        return torch.empty(size_bytes, dtype=torch.uint8)


class SimulatedCopyEngine:
    """Copies into memory outside torch's allocator, which then counts what is on the "device" alone.

    The bytes are copied at once; a clock for each direction says when they would have been on a real link, and the
    computation sleeps until then where it waits for them.

    Args:
        link: how fast the copies are.
        host_bytes: the most that is in host memory at once; allocated here, once.
        now, sleep: the clock, in seconds.
    """

    def __init__(
        self,
        link: Link,
        host_bytes: int,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.memory = HostPool(host_bytes)
        self.stall_seconds = 0.0
        self._link = link
        self._now, self._sleep = now, sleep
        self._to_host_free = self._to_device_free = 0.0
        self._make_memory()

    def _make_memory(self) -> None:
        self.bytes = np.empty(self.memory.size_bytes, dtype=np.uint8)

    def write(self, blocks: HostBlocks, source: Tensor) -> None:
        """Fill host memory with a row of bytes."""
        values = source.numpy()
        for host, device in parts_of(blocks, source.numel()):
            self.bytes[host] = values[device]

    def read(self, blocks: HostBlocks, size_bytes: int) -> Tensor:
        """Returns so many bytes of host memory as new memory of the device."""
        target = empty_bytes(size_bytes, torch.device("cpu"))
        values = target.numpy()
        for host, device in parts_of(blocks, size_bytes):
            values[device] = self.bytes[host]
        return target

    def send(self, source: Tensor) -> SimulatedCopy | None:
        """Begin to copy one row of bytes to host memory; None where that is full."""
        blocks = self.memory.take(source.numel())
        if blocks is None:
            return None
        self._to_host_free = max(self._to_host_free, self._now()) + self._link.to_host_seconds(source.numel())
        copy = SimulatedCopy(self, blocks, source.numel(), self._to_host_free)
        self.write(blocks, source)
        return copy

    def begin_fetch(self, size_bytes: int, sent_seconds: float) -> float:
        """Begin to copy back what was sent by that time; returns the time when it will have arrived."""
        begin = max(self._to_device_free, self._now(), sent_seconds)
        self._to_device_free = begin + self._link.to_device_seconds(size_bytes)
        return self._to_device_free

    def wait_until(self, clock_seconds: float) -> None:
        """The computation waits."""
        seconds = clock_seconds - self._now()
        if seconds > 0:
            self.stall_seconds += seconds
            self._sleep(seconds)


class EstimatedCopyEngine(SimulatedCopyEngine):
    """Copies on a device that is not there, whose clock advances where the computation waits.

    Rows of fake bytes have no values, and take no host memory; those of whole numbers are real, and are copied.
    """

    def __init__(self, device: SimulatedDevice, link: Link, host_bytes: int) -> None:
        self._device = device
        super().__init__(link, host_bytes, now=lambda: device.seconds, sleep=device.wait)

    def _make_memory(self) -> None:
        self._rows: dict[HostBlocks, Tensor] = {}

    def write(self, blocks: HostBlocks, source: Tensor) -> None:
        """Note a row of bytes."""
        if isinstance(source, FakeTensor):
            self._rows[blocks] = source.new_empty(0)
        else:
            with _disable_current_modes():
                self._rows[blocks] = source.clone()

    def read(self, blocks: HostBlocks, size_bytes: int) -> Tensor:
        """Returns a row of bytes as new memory of the device."""
        row = self._rows.pop(blocks)
        if isinstance(row, FakeTensor):
            return row.new_empty(size_bytes)
        self._device.hold(row)
        return row


class SimulatedCopy:
    """A copy that is in host memory from ``done`` on."""

    def __init__(self, engine: SimulatedCopyEngine, blocks: HostBlocks, size_bytes: int, done: float) -> None:
        self._engine = engine
        self._blocks = blocks
        self._size_bytes = size_bytes
        self._done = done

    def wait(self) -> None:
        """Until the copy is done."""
        self._engine.wait_until(self._done)

    def fetch(self) -> SimulatedFetch:
        """Begin the copy back, into new memory of the device."""
        engine, target = self._engine, self._engine.read(self._blocks, self._size_bytes)
        return SimulatedFetch(self, engine, target, engine.begin_fetch(self._size_bytes, self._done))

    def give_back(self) -> None:
        """The host memory is free again."""
        blocks, self._blocks = self._blocks, ()
        if blocks:
            self._engine.memory.give(blocks)

    def __del__(self) -> None:
        self.give_back()


class SimulatedFetch:
    """A copy that is back on the device from ``arrives`` on."""

    def __init__(self, copy: SimulatedCopy, engine: SimulatedCopyEngine, target: Tensor, arrives: float) -> None:
        self._copy = copy
        self._engine = engine
        self._target = target
        self._arrives = arrives

    def wait(self) -> Tensor:
        """Until it has arrived."""
        self._engine.wait_until(self._arrives)
        self._copy.give_back()
        return self._target


CopyEngine = CudaCopyEngine | SimulatedCopyEngine
HostCopy = CudaCopy | SimulatedCopy
HostFetch = CudaFetch | SimulatedFetch
