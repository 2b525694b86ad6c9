"""What is known of a device before anything runs on it: its memory, how fast it runs each kind of op, its links."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import psutil

from profiler.json_files import from_plain, read_document, to_plain, write_document
from profiler.step_graph import Bytes, Seconds

FORMAT = "planner-device"
VERSION = 1
Rate = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Factor = Annotated[float, msgspec.Meta(gt=0)]

# The work of these kinds of op is counted in floating-point operations, that of all others in bytes.
BY_FLOPS = frozenset(
    {
        *("matmul", "convolution", "convolution_backward", "grouped_convolution", "grouped_convolution_backward"),
        *("attention", "attention_backward"),
    }
)
# A kind that a file has no rates for is as fast as another one.
_LIKE = {
    "convolution": "matmul",
    "convolution_backward": "convolution",
    "grouped_convolution": "convolution",
    "grouped_convolution_backward": "convolution_backward",
    "batch_norm": "normalization",
    "batch_norm_backward": "batch_norm",
    "gelu": "transcendental",
    "attention": "matmul",
    "attention_backward": "attention",
}


Points = tuple[tuple[float, float], ...]


def _between(points: Points, work: float) -> float:
    """Returns the value at some work, on straight lines between the points' logarithms; that of the end beyond it.

    Args:
        points: pairs (work, value), by work.
    """
    right = bisect.bisect_right(points, (work, math.inf))
    if right in (0, len(points)):
        return points[max(0, right - 1)][1]
    (low, low_value), (high, high_value) = points[right - 1], points[right]
    share = math.log(work / low) / math.log(high / low)
    return low_value * (high_value / low_value) ** share


def _check_points(name: str, points: Points) -> None:
    """Refuse points that no line can be drawn through; raises ValueError."""
    works = [work for work, _ in points]
    if works != sorted(set(works)) or any(number <= 0 for point in points for number in point):
        raise ValueError(
            f"points of {name}: expected pairs of numbers above 0, each with more work than the one before"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRate:
    """How long ops of one kind take, by their work.

    Attributes:
        kind: of op: ``matmul``, ``convolution``, ``attention`` with work in floating-point operations; ``memory`` and
            its subdivisions (``elementwise``, ``reduction``, ...) with work in bytes that are read and written.
        dtype: of the result; empty for any.
        per_second: work per second at best.
        reached: the share of that which training reaches.
        launch_seconds: the time of an op that has hardly any work.
        points: pairs (work, seconds) that were measured, by work; they replace the three numbers above.
        source: where the numbers are from.
    """

    kind: str
    dtype: str = ""
    per_second: Rate = 0.0
    reached: Share = 1.0
    launch_seconds: Seconds = 0.0
    points: Points = ()
    source: str = ""

    def __post_init__(self) -> None:
        _check_points(self.kind, self.points)

    def seconds(self, work: float) -> float:
        """Returns the time of an op.

        Args:
            work: in floating-point operations or in bytes, as the kind says.
        """
        if not self.points:
            return max(self.launch_seconds, work / (self.per_second * self.reached) if self.per_second else 0.0)
        largest, seconds = self.points[-1]
        return seconds * work / largest if work >= largest else _between(self.points, work)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRecord:
    """What ranks send each other through.

    Attributes:
        bytes_per_second: of one rank, each way, to ranks on the same machine.
        ranks_per_machine: the number of ranks that share a machine.
        between_bytes_per_second: of one rank, each way, to ranks on other machines.
        latency_seconds: of a collective of hardly any bytes.
        reached: the share of the bandwidth that collectives reach.
        source: where the numbers are from.
    """

    bytes_per_second: Rate
    ranks_per_machine: Annotated[int, msgspec.Meta(ge=1)] = 8
    between_bytes_per_second: Rate = 0.0
    latency_seconds: Seconds = 0.0
    reached: Share = 1.0
    source: str = ""

    def seconds(self, whole_bytes: int, ranks: int) -> float:
        """Returns the time in which ranks gather a tensor of which each has a part, or sum one and keep a part each.

        A ring sends all of it but a part. Between machines all ports of a machine carry it together.

        Args:
            whole_bytes: the size of the whole tensor.
            ranks: the number of ranks.
        """
        rate = self.bytes_per_second
        if ranks > self.ranks_per_machine:
            rate = min(rate, self.between_bytes_per_second * self.ranks_per_machine)
        sent_bytes = whole_bytes * (ranks - 1) / ranks
        return self.latency_seconds + (sent_bytes / (rate * self.reached) if rate else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord:
    """The link between the device and host memory, as measured while the device computes.

    Attributes:
        to_host_bytes_per_second, to_device_bytes_per_second: the bandwidth of large copies from and to pinned memory.
        latency_seconds: the time of a copy of hardly any bytes.
        devices: the number of devices that may share it.
        host_bytes: host memory that is there for each of them; None where it is not known.
        pinned: whether the host memory could be pinned.
    """

    to_host_bytes_per_second: Rate
    to_device_bytes_per_second: Rate
    latency_seconds: Seconds = 0.0
    devices: Annotated[int, msgspec.Meta(ge=1)] = 1
    host_bytes: Bytes | None = None
    pinned: bool = True


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """A device, as ``planner estimate`` knows it.

    Attributes:
        name: of the device, for people.
        kind: ``cuda`` or ``cpu``: whose kernels run, and whose allocator counts.
        memory_bytes: of the device.
        context_bytes: the part of them that is gone before any tensor is there.
        origin: ``data sheet``: the numbers are from public documents; ``calibrated``: measured on the device;
            ``assumed``: neither.
        op_paces: ops, each with pairs (work, time within steps relative to that by the rate of its kind), as measured.
        pace: the time of whole steps relative to the sum of their ops'.
        least_seconds, most_seconds: factors between which the time of a step is expected, relative to its estimate.
        rates: by kind of op and type of number.
        link: to host memory.
        network: between ranks; None where it is not known.
        sources: of the numbers that are not in ``rates``, a line each.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: Bytes
    context_bytes: Bytes = 0
    origin: Literal["data sheet", "calibrated", "assumed"]
    op_paces: tuple[tuple[str, Points], ...] = ()
    pace: Factor = 1.0
    least_seconds: Factor = 1.0
    most_seconds: Factor = 1.0
    rates: tuple[OpRate, ...]
    link: LinkRecord | None = None
    network: NetworkRecord | None = None
    sources: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for op, points in self.op_paces:
            _check_points(op, points)

    @property
    def budget_bytes(self) -> int:
        """Bytes that a training step may have on it."""
        return self.memory_bytes - self.context_bytes

    @cached_property
    def _rates(self) -> Mapping[tuple[str, str], OpRate]:
        return {(rate.kind, rate.dtype): rate for rate in self.rates}

    @cached_property
    def _paces(self) -> Mapping[str, Points]:
        return dict(self.op_paces)

    def pace_of(self, op: str, work: float) -> float:
        """Returns the time of an op within steps relative to that by the rate of its kind."""
        points = self._paces.get(op)
        return self.pace * (_between(points, work) if points else 1.0)

    def rate_of(self, kind: str, dtype: str) -> OpRate:
        """Returns the rate of a kind of op: for the type of number, for any type, or that of the next similar kind.

        Args:
            kind: as in ``OpRate``.
            dtype: the name of torch's type, without ``torch.``.
        """
        while True:
            for found in ((kind, dtype), (kind, "")):
                if found in self._rates:
                    return self._rates[found]
            if kind == "memory":
                return OpRate(kind="memory")
            if kind == "matmul":  # Of a type that the file does not name.
                return next((rate for rate in self.rates if rate.kind == "matmul"), OpRate(kind="matmul"))
            kind = _LIKE.get(kind, "memory")

    def save(self, path: str | Path) -> None:
        """Write the device as JSON, whole or not at all."""
        write_document(path, {"format": FORMAT, "version": VERSION, **to_plain(self)})

    @classmethod
    def load(cls, path: str | Path) -> DeviceRecord:
        """Read a device file.

        Raises:
            ValueError: the file is missing or of another format, or lacks a field.
        """
        return cls._of(read_document(path, {FORMAT: VERSION}), str(path))

    @classmethod
    def named(cls, name: str) -> DeviceRecord:
        """Returns a device by the name of a card, as ``h100``, or by the path of a device file; ``cpu`` is this CPU.

        Raises:
            ValueError: there is no such card, or the file cannot be read.
        """
        if name.lower() == "cpu":
            return _this_cpu()
        if name.lower() in device_names():
            text = (resources.files("profiler") / "devices" / f"{name.lower()}.json").read_text()
            return cls._of(msgspec.json.decode(text), name)
        if "/" in name or name.endswith(".json"):
            return cls.load(name)
        raise ValueError(
            f"device: there is no card {name!r}; use {', '.join(device_names())}, cpu, or a file that "
            "`planner calibrate -o device.json` writes on the device itself"
        )

    @classmethod
    def _of(cls, document: Mapping[str, Any], where: str) -> DeviceRecord:
        data = {key: value for key, value in document.items() if key not in ("format", "version")}
        try:
            return from_plain(cls, data)
        except ValueError as error:
            raise ValueError(f"{where}: this is no device file: {error}; write one with planner calibrate") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRecord:
    """What a profile stands on that no device has measured.

    Attributes:
        device: the name of the device.
        origin: of what is known of it: ``data sheet``, ``calibrated`` on the device itself, or ``assumed``.
        memory_bytes: that a step may have on it.
        least_seconds, most_seconds: factors between which the time of a step is expected, relative to its estimate.
        margin_bytes: by which the peak may be higher than predicted.
        margin: why, in words; empty without one.
    """

    device: str
    origin: Literal["data sheet", "calibrated", "assumed"]
    memory_bytes: Bytes
    least_seconds: Rate
    most_seconds: Rate
    margin_bytes: Bytes = 0
    margin: str = ""

    def in_words(self) -> str:
        """What it is that no device has measured, and how far off it may be."""
        of = {"data sheet": "its data sheet", "calibrated": "ops timed on it", "assumed": "assumed speeds"}
        text = f"for {self.device}, from {of[self.origin]}; the time may be {self.least_seconds:g} to "
        text += f"{self.most_seconds:g} times as long"
        return f"{text}, the peak {self.margin_bytes:,} bytes higher: {self.margin}" if self.margin_bytes else text


def _this_cpu() -> DeviceRecord:
    """Returns the CPU at hand: its memory as it is, and what its cores may do, assumed."""
    cores, source = os.cpu_count() or 1, "assumed for a core with AVX2"
    rates = (
        OpRate(kind="matmul", per_second=4e10 * cores, launch_seconds=8e-6, source=source),
        OpRate(kind="memory", per_second=5e9 * cores, launch_seconds=5e-6, source=source),
    )
    return DeviceRecord(
        name=f"this CPU with {cores} cores",
        kind="cpu",
        memory_bytes=psutil.virtual_memory().total,
        origin="assumed",
        rates=rates,
        least_seconds=0.3,
        most_seconds=3.0,
    )


def device_names() -> list[str]:
    """Returns the names of the cards that come with the package."""
    folder = resources.files("profiler") / "devices"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def is_card(device: str | None) -> bool:
    """Whether a name is that of a card or of a device file, and not of a device of torch's."""
    return device is not None and (device.lower() in device_names() or device.endswith(".json"))
