"""The link: how fast bytes travel between device and host memory, and how many the host may hold."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A copy engine for each direction, both at work at once, beside the computation.

    Attributes:
        to_host_bytes_per_second, to_device_bytes_per_second: of one device, its share where several use one link;
            0 where nothing can be sent, infinity where copies take no time.
        latency_seconds: that each copy takes beside.
        host_bytes: the most bytes that this device may hold in host memory; None without a limit.

    >>> Link(to_host_bytes_per_second=1e9, to_device_bytes_per_second=2e9, latency_seconds=0.5).to_host_seconds(10**9)
    1.5
    """

    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    latency_seconds: float = 0.0
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("to_host_bytes_per_second", "to_device_bytes_per_second", "latency_seconds"):
            value = getattr(self, name)
            endless = name == "latency_seconds" and value == math.inf
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0 or endless:
                raise ValueError(f"a link: expected {name} to be a number, not negative, got {value!r}; correct it")
        limit = self.host_bytes
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
            raise ValueError(
                f"a link: expected host_bytes to be an integer number of bytes, not negative, got {limit!r}; correct it"
            )

    @property
    def usable(self) -> bool:
        """Whether anything can be sent and brought back."""
        rates = (self.to_host_bytes_per_second, self.to_device_bytes_per_second)
        return min(rates) > 0 and self.host_bytes != 0

    def to_host_seconds(self, size_bytes: int) -> float:
        """Seconds of one copy to host memory."""
        return self.latency_seconds + size_bytes / self.to_host_bytes_per_second

    def to_device_seconds(self, size_bytes: int) -> float:
        """Seconds of one copy back."""
        return self.latency_seconds + size_bytes / self.to_device_bytes_per_second
