"""How fast a device copies to host memory and back while it computes, and how much the host may hold."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from profiler.measurement.device_memory import available_host_bytes
from profiler.records import LinkRecord

# Long against the 10 microseconds that a copy takes to begin, short against the memory of a device: at 25 GB/s it takes
# 2.7 ms.
COPY_BYTES = 64 * 1024**2
REPEATS = 5
# Of what is free on the device at most this part is taken for measuring.
_PART_OF_FREE = 8
_WIDTH = 2048


def measure_link(device: torch.device) -> LinkRecord | None:
    """Measure the link of a device; None where it has no streams besides the computation's."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        return _Copies(device).record()


class _Copies:
    """Timed copies on a side stream while the device multiplies matrices."""

    def __init__(self, device: torch.device) -> None:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        self._size = max(1, min(COPY_BYTES, free_bytes // _PART_OF_FREE))
        self._device = torch.empty(self._size, dtype=torch.uint8, device=device)
        self._host, self._pinned = _host_buffer(self._size)
        self._factor = torch.zeros(_WIDTH, _WIDTH, device=device)
        self._product = torch.zeros(_WIDTH, _WIDTH, device=device)
        self._stream = torch.cuda.Stream(device)

    def record(self) -> LinkRecord:
        to_host = self._seconds(self._host, self._device)
        to_device = self._seconds(self._device, self._host)
        latency = max(self._seconds(self._host[:1], self._device[:1]), self._seconds(self._device[:1], self._host[:1]))
        devices = torch.cuda.device_count()
        return LinkRecord(
            to_host_bytes_per_second=_rate(self._size, to_host, latency),
            to_device_bytes_per_second=_rate(self._size, to_device, latency),
            latency_seconds=latency,
            devices=devices,
            host_bytes=pinnable_bytes(available_host_bytes() // devices),
            pinned=self._pinned,
        )

    def _seconds(self, target: Tensor, source: Tensor) -> float:
        """Of one copy; the first, which warms up, does not count."""
        return statistics.median([self._one(target, source) for _ in range(1 + REPEATS)][1:])

    def _one(self, target: Tensor, source: Tensor) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._compute()
        begin.record(self._stream)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        end.record(self._stream)
        self._compute()
        torch.cuda.synchronize(self._device.device)
        return begin.elapsed_time(end) / 1000.0

    def _compute(self) -> None:
        """Keep the device busy for some milliseconds."""
        for _ in range(10):
            torch.mm(self._factor, self._factor, out=self._product)


def pinnable_bytes(free_bytes: int) -> int:
    """The most that may be asked for as pinned memory where so much is free: a power of two.

    Torch's pinned allocator takes the next power of two of the system (CachingHostAllocator): for 70 GB 128 GiB, which
    may be more than there is.
    """
    return 1 << free_bytes.bit_length() - 1 if free_bytes > 0 else 0


def _host_buffer(size_bytes: int) -> tuple[Tensor, bool]:
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True), True
    except RuntimeError:  # Torch has no kind of its own for what cudaHostAlloc refuses.
        return torch.empty(size_bytes, dtype=torch.uint8), False


def _rate(size_bytes: int, seconds: float, latency_seconds: float) -> float:
    moving = seconds - latency_seconds
    return size_bytes / (moving if moving > 0 else seconds)
