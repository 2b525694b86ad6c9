"""A copy engine on the CPU whose copies take the time that a link of a stated speed would."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from planner.runtime.copy_engine import empty_bytes
from planner.runtime.host_pool import HostBlocks, HostPool, parts_of
from profiler.workload.compiled_forwards import leave_uncompiled
from solvers.problem.link import Link

leave_uncompiled(__name__)


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
        self.bytes = np.empty(self.memory.size_bytes, dtype=np.uint8)
        self.stall_seconds = 0.0
        self._link = link
        self._now, self._sleep = now, sleep
        self._to_host_free = self._to_device_free = 0.0

    def send(self, source: Tensor) -> SimulatedCopy | None:
        """Begin to copy one row of bytes to host memory; None where that is full."""
        blocks = self.memory.take(source.numel())
        if blocks is None:
            return None
        self._to_host_free = max(self._to_host_free, self._now()) + self._link.to_host_seconds(source.numel())
        copy = SimulatedCopy(self, blocks, source.numel(), self._to_host_free)
        values = source.numpy()
        for host, device in parts_of(blocks, source.numel()):
            self.bytes[host] = values[device]
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

    def fetch(self, *, keep: bool = False) -> SimulatedFetch:
        """Begin the copy back; ``keep`` what is in host memory, for others."""
        engine, target = self._engine, empty_bytes(self._size_bytes, torch.device("cpu"))
        values = target.numpy()
        for host, device in parts_of(self._blocks, self._size_bytes):
            values[device] = engine.bytes[host]
        return SimulatedFetch(self, engine, target, engine.begin_fetch(self._size_bytes, self._done), keep=keep)

    def give_back(self) -> None:
        """The host memory is free again."""
        blocks, self._blocks = self._blocks, ()
        if blocks:
            self._engine.memory.give(blocks)

    def __del__(self) -> None:
        self.give_back()


class SimulatedFetch:
    """A copy that is back on the device from ``arrives`` on."""

    def __init__(
        self, copy: SimulatedCopy, engine: SimulatedCopyEngine, target: Tensor, arrives: float, *, keep: bool
    ) -> None:
        self._copy = copy
        self._keep = keep
        self._engine = engine
        self._target = target
        self._arrives = arrives

    def wait(self) -> Tensor:
        """Until it has arrived."""
        self._engine.wait_until(self._arrives)
        if not self._keep:
            self._copy.give_back()
        return self._target
