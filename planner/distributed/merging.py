"""Profiles and measurements of all ranks as one: the largest bytes and seconds of any rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.distributed.rank_failures import RankError
from profiler.agreement import UnlikeValues, merged_largest
from profiler.measurement.step_measurement import Measurement
from profiler.records import LinkRecord, Profile, ResidentBytes


def merged_profile(profiles: Sequence[Profile]) -> Profile:
    """The profile of the worst rank: that of every phase, for all of them do the same at the same time.

    Ops and options are those of the first rank; what is unsteady on any rank is so.

    Args:
        profiles: one for each rank, in their order.

    Raises:
        RankError: they differ in more than bytes and seconds: says which rank, and in what.
    """
    first = profiles[0]
    alike = [replace(profile, op_records=first.op_records) for profile in profiles]
    try:
        return merged_largest(
            alike,
            {
                "resident": _largest_resident,
                "late_releases": _largest_late_releases,
                "freed_bytes": min,
                "link": _slowest_link,
                "device": lambda devices: devices[0],
                "unsteady": _all_lines,
                "batch_sized": _all_lines,
                "unplanned_peak_bytes": max,
            },
        )
    except UnlikeValues as error:
        raise RankError(
            f"profile: expected the same step on every rank, got one that differs on rank {error.number} in "
            f"{error.where}: {error.got!r}, on rank 0 {error.expected!r}; give every rank the same model, and a batch "
            "of the same shapes",
            error.number,
        ) from error


def merged_measurement(measurements: Sequence[Measurement], rank: int) -> Measurement:
    """The highest peak and the longest steps of any rank; the loss is this rank's.

    Args:
        measurements: one for each rank, in their order.
        rank: this process's.
    """
    peaks = tuple(each.peak_bytes for each in measurements)
    merged = merged_largest([replace(each, loss=0.0) for each in measurements])
    return replace(merged, loss=measurements[rank].loss, rank_peak_bytes=peaks)


def _largest_resident(residents: Sequence[ResidentBytes]) -> ResidentBytes:
    return max(residents, key=lambda resident: resident.total)


def _largest_late_releases(releases: Sequence[tuple[tuple[int, int], ...]]) -> tuple[tuple[int, int], ...]:
    most: dict[int, int] = {}
    for position, size_bytes in (pair for each in releases for pair in each):
        most[position] = max(most.get(position, 0), size_bytes)
    return tuple(sorted(most.items()))


def _slowest_link(links: Sequence[LinkRecord | None]) -> LinkRecord | None:
    there = [link for link in links if link is not None]
    if len(there) < len(links):
        return None
    host_bytes = [link.host_bytes for link in there if link.host_bytes is not None]
    return LinkRecord(
        to_host_bytes_per_second=min(link.to_host_bytes_per_second for link in there),
        to_device_bytes_per_second=min(link.to_device_bytes_per_second for link in there),
        latency_seconds=max(link.latency_seconds for link in there),
        devices=max(link.devices for link in there),
        host_bytes=min(host_bytes) if len(host_bytes) == len(there) else None,
        pinned=all(link.pinned for link in there),
    )


def _all_lines(lines: Sequence[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for each in lines for line in each))
