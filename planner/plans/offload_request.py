"""The request to offload to host memory: whether, over which link, and how much; the link that results, and what may be
sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from planner.units import format_bytes, parse_bytes_or_zero
from profiler.device_record import LinkRecord
from profiler.op_graph import StageOps
from profiler.records import Profile
from solvers import Chain, Schedule
from solvers.problem.chain import Link
from solvers.problem.schedule import RUNS

OffloadMode = Literal["auto", "never", "only"]
MODES: tuple[OffloadMode, ...] = get_args(OffloadMode)
GIGABYTE = 10**9
_RATES = ("to_host_bytes_per_second", "to_device_bytes_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Settings for offloading activations to host memory.

    Attributes:
        mode: ``auto`` weighs offloading against recomputation if there is a link; ``never`` offloads nothing; ``only``
            offloads and recomputes nothing.
        link_gbps: gigabytes (1e9 bytes) per second of the link in each direction; None for what was measured.
        devices_per_link: devices that share the link, each with an equal part; None for what was measured.
        host_memory: the most that this device may hold in host memory, bytes or text as ``64GiB``; None for what was
            measured.
    """

    mode: OffloadMode = "auto"
    link_gbps: float | None = None
    devices_per_link: int | None = None
    host_memory: str | int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"offload: expected one of {', '.join(MODES)}, got {self.mode!r}; choose one of them")
        if self.link_gbps is not None and not self.link_gbps >= 0:
            raise ValueError(f"a link: expected gigabytes per second, not negative, got {self.link_gbps!r}; correct it")
        if self.devices_per_link is not None and self.devices_per_link < 1:
            raise ValueError(f"a link: expected at least one device on it, got {self.devices_per_link!r}; correct it")
        if self.host_memory is not None:
            parse_bytes_or_zero(self.host_memory)

    def link(self, measured: LinkRecord | None) -> Link | None:
        """The link with this device's share; None where none is known or wanted."""
        if self.mode == "never" or (measured is None and self.link_gbps is None):
            return None
        record = measured or LinkRecord(to_host_bytes_per_second=0.0, to_device_bytes_per_second=0.0)
        given = None if self.link_gbps is None else self.link_gbps * GIGABYTE
        devices = self.devices_per_link or record.devices
        return Link(
            to_host_bytes_per_second=(record.to_host_bytes_per_second if given is None else given) / devices,
            to_device_bytes_per_second=(record.to_device_bytes_per_second if given is None else given) / devices,
            latency_seconds=record.latency_seconds,
            host_bytes=record.host_bytes if self.host_memory is None else parse_bytes_or_zero(self.host_memory),
        )


def offload_from(offload_request: Offload | OffloadMode) -> Offload:
    """The request that a word stands for."""
    return offload_request if isinstance(offload_request, Offload) else Offload(mode=offload_request)


def usable_link(offload_request: Offload, chain: Chain, measured: LinkRecord | None) -> tuple[Link | None, str]:
    """The link that the solver may count on, or why there is none (empty where none was asked for).

    Raises:
        ValueError: offloading was demanded, and nothing can be sent.
    """
    parts = (part for stage in chain.stages for part in (stage, *stage.options))
    smallest_bytes = min((unit_bytes for part in parts for unit_bytes in part.offload_units), default=None)
    link = offload_request.link(measured)
    why = _why_not(link, smallest_bytes)
    if not why:
        return link, ""
    if offload_request.mode == "only":
        raise ValueError(f"offload: nothing can be sent to host memory: {why}")
    asked = offload_request.mode == "auto" and (link is not None or offload_request != Offload())
    return None, why if asked else ""


def _why_not(link: Link | None, smallest: int | None) -> str:
    if link is None:
        return (
            "the profile has no link to host memory: profile on a CUDA device, or give a speed, --offload gbps=25 "
            "(link_gbps=25)"
        )
    if not min(link.to_host_bytes_per_second, link.to_device_bytes_per_second) > 0:
        return "the link's speed is 0: give one above 0"
    if smallest is None:
        return "nothing of this model can be sent: profile with menus, which record what each stage keeps"
    if link.host_bytes is not None and link.host_bytes < smallest:
        return (
            f"host memory of {format_bytes(link.host_bytes)} holds not even the smallest tensor that could be sent, "
            f"{format_bytes(smallest)}: allow more, --offload host=64GiB (host_memory=)"
        )
    return ""


def link_document(link: Link | None) -> dict[str, float | int | None] | None:
    """A link as plain data; JSON knows no infinity, so an unlimited rate is null."""
    if link is None:
        return None
    return {name: None if value == math.inf else value for name, value in asdict(link).items()}


def link_from(data: Mapping[str, Any] | None) -> Link | None:
    """Read what ``link_document`` wrote; raises TypeError or ValueError on anything else."""
    if data is None:
        return None
    values: dict[str, Any] = {k: math.inf if value is None and k in _RATES else value for k, value in data.items()}
    return Link(**values)


# Less than a page is not worth a copy and the memory of its host buffer.
SMALLEST_OFFLOAD_UNIT_BYTES = 4096


def kept_offload_units(profile: Profile, k: int) -> tuple[int, ...]:
    """Storages (numbers in the stage's ``StageOps``) that may be offloaded while stage ``k`` is kept, one unit each.

    None of what a program hands over to backward.

    What the stage makes and keeps for its own backward alone, and its input where nothing else needs it: no parameter,
    nothing that other stages hold or that the model was handed, nothing smaller than a page. Of a stage that was not
    seen to run a second time and leave nothing behind, nothing: what it stores somewhere would not go from the device.

    Args:
        profile: of the model.
        k: position of the stage.
    """
    record = profile.stages[k]
    if record.menu < 0 or not record.recomputable:
        return ()
    return offload_units_among(profile.menus[record.menu].ops, with_input=bool(input_offload_units(profile, k)))


def offload_units_among(ops: StageOps, *, with_input: bool) -> tuple[int, ...]:
    """``kept_offload_units`` by a stage's ops alone; ``with_input``: its input, too, lives for this stage alone."""
    saved = set(ops.saves)
    return tuple(
        number
        for number, storage in enumerate(ops.storages)
        if number in saved
        and storage.size_bytes >= SMALLEST_OFFLOAD_UNIT_BYTES
        and not storage.returned
        and ((storage.op >= 0 and not storage.always_live) or (storage.dies_after_stage and with_input))
    )


def kept_offload_unit_bytes(profile: Profile, k: int) -> tuple[int, ...]:
    """Bytes of each of ``kept_offload_units``."""
    numbers = kept_offload_units(profile, k)
    return tuple(profile.menus[profile.stages[k].menu].ops.storages[number].size_bytes for number in numbers)


def input_offload_units(profile: Profile, k: int) -> tuple[tuple[int, ...], ...]:
    """Input tensors (numbers among the call's tensors) that may be offloaded while stage ``k`` waits to run again.

    One offload unit of all that comes from the stage before and lives for this stage alone; none where the stage before
    keeps some of it itself, or other stages hold some of it.
    """
    record = profile.stages[k]
    if not record.links or k == 0 or record.kind != "stage":
        return ()
    before = profile.stages[k - 1]
    shared = any(k in tensor.linked_readers for tensor in profile.shared)
    if shared or before.kept_output_bytes or before.boundary_bytes < SMALLEST_OFFLOAD_UNIT_BYTES:
        return ()
    return (tuple(leaf for leaf, _ in record.links),)


def input_offload_unit_bytes(profile: Profile, k: int) -> tuple[int, ...]:
    """Bytes of each of ``input_offload_units``."""
    return tuple(profile.stages[k - 1].boundary_bytes for _ in input_offload_units(profile, k))


def sent_bytes(chain: Chain, schedule: Schedule) -> Counter[int]:
    """Bytes that each stage sends to host memory in one step."""
    bytes_by_stage: Counter[int] = Counter()
    options: dict[int, int] = {}
    for action in schedule.actions:
        if action.kind in RUNS and action.option is not None:
            options[action.stage] = action.option
        elif action.kind == "send":
            stage = chain.stages[action.stage]
            option = options.get(action.stage)
            units = stage.offload_units if option is None else stage.options[option].offload_units
            bytes_by_stage[action.stage] += units[action.option or 0]
    return bytes_by_stage
