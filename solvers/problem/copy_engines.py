"""The simulator's copy engines: one clock for each direction, what is on its way, and the host memory in use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from solvers.problem.link import Link

Direction = Literal["to_host", "to_device"]
_Place = Literal["leaving", "away", "coming"]


class CopyError(ValueError):
    """A copy that cannot be; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One offload unit on its way, in seconds since the step began."""

    stage: int
    unit: int
    direction: Direction
    begin_seconds: float
    end_seconds: float
    size_bytes: int


@dataclass(slots=True)
class _Journey:
    size_bytes: int
    place: _Place
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
        self._journeys: dict[tuple[int, int], _Journey] = {}

    def away(self) -> tuple[tuple[int, int], ...]:
        """Stage and offload unit of all that is not on the device."""
        return tuple(sorted(key for key, journey in self._journeys.items() if journey.place == "away"))

    def travels(self, stage: int) -> bool:
        """Whether anything of a stage left and is not in its hands again."""
        return any(key[0] == stage for key in self._journeys)

    def offload(self, stage: int, unit: int, size_bytes: int, now: float) -> None:
        """Begin to copy an offload unit to host memory."""
        if self._link is None:
            raise CopyError("something is sent to host memory, but there is no usable link")
        if (stage, unit) in self._journeys:
            raise CopyError(f"offload unit {unit} of stage {stage} is sent twice")
        limit = self._link.host_bytes
        self.host_bytes += size_bytes
        self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        if limit is not None and self.host_bytes > limit:
            raise CopyError(f"{self.host_bytes} bytes of host memory are used, the limit is {limit}")
        done = self._copy(stage, unit, size_bytes, "to_host", self._link.to_host_seconds(size_bytes), now)
        self._journeys[stage, unit] = _Journey(size_bytes, "leaving", done)

    def release(self, stage: int, unit: int, now: float) -> float:
        """Give back an offload unit's device bytes; returns the seconds that the computation waits for its copy."""
        journey = self._find(stage, unit, "leaving")
        journey.place = "away"
        self.away_bytes += journey.size_bytes
        return max(0.0, journey.done_seconds - now)

    def prefetch(self, stage: int, unit: int, now: float) -> None:
        """Take an offload unit's device bytes again and begin to copy it back."""
        assert self._link is not None
        journey = self._find(stage, unit, "away")
        journey.place = "coming"
        self.away_bytes -= journey.size_bytes
        seconds = self._link.to_device_seconds(journey.size_bytes)
        journey.done_seconds = self._copy(stage, unit, journey.size_bytes, "to_device", seconds, now)

    def hand_over(self, stage: int, now: float) -> float:
        """The stage uses its offload units; returns the seconds that it waits until all of them are back."""
        mine = [key for key in self._journeys if key[0] == stage]
        arrives = now
        for key in mine:
            journey = self._journeys.pop(key)
            if journey.place != "coming":
                raise CopyError(f"stage {stage} needs its offload unit {key[1]}, which is not fetched back")
            arrives = max(arrives, journey.done_seconds)
            self.host_bytes -= journey.size_bytes
        return arrives - now

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

    def _find(self, stage: int, unit: int, place: _Place) -> _Journey:
        journey = self._journeys.get((stage, unit))
        if journey is None or journey.place != place:
            wanted = "on its way to host memory" if place == "leaving" else "in host memory alone"
            raise CopyError(f"offload unit {unit} of stage {stage} is not {wanted}")
        return journey
