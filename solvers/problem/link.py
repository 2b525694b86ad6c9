"""The link between device and host memory: bytes per second each way, latency, and the host memory there is."""

from __future__ import annotations

from dataclasses import dataclass

from solvers.problem.number_checks import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A copy engine for each direction; both work at the same time, while the device computes.

    Attributes:
        to_host_bytes_per_second, to_device_bytes_per_second: of one device, its share where several use one link;
            0 where nothing can be sent, infinity where copies take no time.
        latency_seconds: that each copy takes in addition.
        host_bytes: the most bytes that this device may hold in host memory; None without a limit.

    >>> Link(to_host_bytes_per_second=1e9, to_device_bytes_per_second=2e9, latency_seconds=0.5).to_host_seconds(10**9)
    1.5
    """

    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    latency_seconds: float = 0.0
    host_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("to_host_bytes_per_second", "to_device_bytes_per_second"):
            rate = getattr(self, name)
            if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not rate >= 0:
                raise ValueError(f"a link: expected {name} to be a number, not negative, got {rate!r}; correct it")
        check_number("a link", "latency_seconds", self.latency_seconds)
        if self.host_bytes is not None:
            check_number("a link", "host_bytes", self.host_bytes)

    @property
    def usable(self) -> bool:
        """Whether anything can be copied to the host and back."""
        rates = (self.to_host_bytes_per_second, self.to_device_bytes_per_second)
        return min(rates) > 0 and self.host_bytes != 0

    def to_host_seconds(self, size_bytes: int) -> float:
        """Seconds of one copy to host memory."""
        return self.latency_seconds + size_bytes / self.to_host_bytes_per_second

    def to_device_seconds(self, size_bytes: int) -> float:
        """Seconds of one copy back."""
        return self.latency_seconds + size_bytes / self.to_device_bytes_per_second
