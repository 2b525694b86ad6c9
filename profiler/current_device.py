"""The device that steps are simulated on now, if there is one, and its clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

# A ``SimulatedDevice``, whose module loads torch.
_active: Any = None


def active_device() -> Any:
    """Returns the ``SimulatedDevice`` that steps are simulated on now; None where they run on a real one."""
    return _active


def host_seconds() -> float:
    """Returns the seconds of a clock: of the simulated device, or of this process where there is none."""
    return time.perf_counter() if _active is None else _active.seconds


@contextlib.contextmanager
def activated(device: Any) -> Iterator[None]:
    """Inside, steps are simulated on this device.

    Raises:
        RuntimeError: one is being simulated already.
    """
    global _active
    if _active is not None:
        raise RuntimeError("simulating: a device is being simulated already; leave it first")
    _active = device
    try:
        yield
    finally:
        _active = None
