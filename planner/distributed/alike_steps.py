"""What ranks that measure one step together need in common (model, shapes, training), and their results as one: the
largest bytes and seconds of any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from planner.distributed.ranks import RankError, Ranks
from profiler.agreement import UnlikeValues, merged_largest
from profiler.device_record import LinkRecord
from profiler.measurement.step_measurement import Measurement
from profiler.records import Profile, ResidentBytes
from profiler.workload.given_models import class_name
from profiler.workload.tensor_parts import sizes_of
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload

_MOST_NAMED = 3


def check_alike(ranks: Ranks, what: str, workload: Workload) -> None:
    """Refuse workloads of which a step could not be the same on all ranks; values may differ.

    Args:
        ranks: all of them call this.
        what: the function that was called, which begins the message.
        workload: this rank's.

    Raises:
        RankError: says which rank's differs, and in what.
    """
    first, *others = ranks.gathered(_described(workload))
    for rank, other in enumerate(others, start=1):
        for name, expected in first.items():
            if other[name] != expected:
                raise RankError(
                    f"{what}: expected the same {name} on every rank, got {_difference(expected, other[name], rank)}; "
                    "give every rank the same model and batches of the same shapes (drop_last=True), whatever is in "
                    "them",
                    rank,
                )


def _described(workload: Workload) -> dict[str, Any]:
    return {
        "model": {"class": type(workload.model).__name__, **_parameters(workload.model)},
        "modules in training mode": {n: str(m.training) for n, m in workload.model.named_modules()},
        "shapes of the batch": {str(n): _form(t) for n, t in enumerate(tensors_in(workload.inputs))},
        "training": {
            "optimizer": ", ".join(type(each).__name__ for each in workload.optimizers),
            "autocast": str(workload.autocast),
            "accumulate": str(workload.accumulate),
            "scaler": type(workload.scaler).__name__,
            "clip_norm": str(workload.clip_norm),
            "step": str(workload.custom_step is not None),
        },
    }


def _parameters(model: nn.Module) -> dict[str, str]:
    modules = {f"class of {name}": class_name(module) for name, module in model.named_modules() if name}
    parameters = {
        name: f"{_form(parameter)}{'' if parameter.requires_grad else ', frozen'}"
        for name, parameter in model.named_parameters()
    }
    return {**modules, **parameters}


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(sizes_of(tensor))}"


def _difference(expected: dict[str, str], got: dict[str, str], rank: int) -> str:
    """The first few entries that differ, in words."""
    names = [name for name in dict.fromkeys([*expected, *got]) if expected.get(name) != got.get(name)]
    named = [
        f"{name} {got.get(name, 'missing')} on rank {rank} and {expected.get(name, 'missing')} on rank 0"
        for name in names[:_MOST_NAMED]
    ]
    more = f" (and {len(names) - _MOST_NAMED} more)" if len(names) > _MOST_NAMED else ""
    return "; ".join(named) + more


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
