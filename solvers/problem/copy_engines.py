"""The simulator's copy engines: one clock for each direction, the copies under way, and the host memory in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from solvers.problem.link import Link

Direction = Literal["to_host", "to_device"]
_Phase = Literal["leaving", "away", "coming"]


class CopyError(ValueError):
    """A copy that cannot be; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The copy of one offload unit, in seconds since the step began."""

    stage: int
    unit: int
    direction: Direction
    begin_seconds: float
    end_seconds: float
    size_bytes: int


@dataclass(slots=True)
class _Transfer:
    size_bytes: int
    phase: _Phase
    done_seconds: float  # of the copy that began last


class CopyEngines:
    """Both engines take copies one after another, in the order in which they are asked for.

    Attributes:
        copies: all that were asked for, in that order.
        away_bytes: that offload units in host memory leave free on the device.
        host_bytes: in use; an offload unit takes them from the begin of its copy until its stage has it again.
        host_peak_bytes: the most until now.
    """

    def __init__(self, link: Link | None) -> None:
        self.copies: list[Copy] = []
        self.away_bytes = 0
        self.host_bytes = 0
        self.host_peak_bytes = 0
        self._link = link if link is not None and link.usable else None
        self._free_seconds: dict[Direction, float] = {"to_host": 0.0, "to_device": 0.0}
        self._transfers: dict[tuple[int, int], _Transfer] = {}

    def away(self) -> tuple[tuple[int, int], ...]:
        """Stage and offload unit of all that is not on the device."""
        return tuple(sorted(key for key, transfer in self._transfers.items() if transfer.phase == "away"))

    def has_transfers(self, stage: int) -> bool:
        """Whether any offload unit of a stage was sent away and is not handed back to it."""
        return any(key[0] == stage for key in self._transfers)

    def offload(self, stage: int, unit: int, size_bytes: int, now: float) -> None:
        """Begin to copy an offload unit to host memory."""
        if self._link is None:
            raise CopyError("something is sent to host memory, but there is no usable link")
        if (stage, unit) in self._transfers:
            raise CopyError(f"offload unit {unit} of stage {stage} is sent twice")
        limit = self._link.host_bytes
        self.host_bytes += size_bytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        if limit is not None and self.host_bytes > limit:
            raise CopyError(f"{self.host_bytes} bytes of host memory are used, the limit is {limit}")
        done = self._copy(stage, unit, size_bytes, "to_host", self._link.to_host_seconds(size_bytes), now)
        self._transfers[stage, unit] = _Transfer(size_bytes, "leaving", done)

    def release(self, stage: int, unit: int, now: float) -> float:
        """Give back an offload unit's device bytes; returns the seconds that the computation waits for its copy."""
        transfer = self._find(stage, unit, "leaving")
        transfer.phase = "away"
        self.away_bytes += transfer.size_bytes
        return max(0.0, transfer.done_seconds - now)

    def prefetch(self, stage: int, unit: int, now: float) -> None:
        """Take an offload unit's device bytes again and begin to copy it back."""
        assert self._link is not None
        transfer = self._find(stage, unit, "away")
        transfer.phase = "coming"
        self.away_bytes -= transfer.size_bytes
        seconds = self._link.to_device_seconds(transfer.size_bytes)
        transfer.done_seconds = self._copy(stage, unit, transfer.size_bytes, "to_device", seconds, now)

    def hand_over(self, stage: int, now: float) -> float:
        """The stage uses its offload units; returns the seconds that it waits until all of them are back."""
        keys = [key for key in self._transfers if key[0] == stage]
        ready_seconds = now
        for key in keys:
            transfer = self._transfers.pop(key)
            if transfer.phase != "coming":
                raise CopyError(f"stage {stage} needs its offload unit {key[1]}, which is not fetched back")
            ready_seconds = max(ready_seconds, transfer.done_seconds)
            self.host_bytes -= transfer.size_bytes
        return ready_seconds - now

    def _copy(self, stage: int, unit: int, size_bytes: int, direction: Direction, seconds: float, now: float) -> float:
        begin = max(self._free_seconds[direction], now)
        end = self._free_seconds[direction] = begin + seconds
        self.copies.append(
            Copy(
                stage=stage,
                unit=unit,
                direction=direction,
                begin_seconds=begin,
                end_seconds=end,
                size_bytes=size_bytes,
            )
        )
        return end

    def _find(self, stage: int, unit: int, phase: _Phase) -> _Transfer:
        transfer = self._transfers.get((stage, unit))
        if transfer is None or transfer.phase != phase:
            wanted = "on its way to host memory" if phase == "leaving" else "in host memory alone"
            raise CopyError(f"offload unit {unit} of stage {stage} is not {wanted}")
        return transfer
