"""Offload units: what a stage holds between forward and backward and may send to host memory."""

from __future__ import annotations

from collections import Counter

from profiler.op_graph import StageOps
from profiler.records import Profile
from solvers import Chain, Schedule
from solvers.problem.chain import RUNS

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
        elif action.kind == "offload":
            stage = chain.stages[action.stage]
            option = options.get(action.stage)
            units = stage.offload_units if option is None else stage.options[option].offload_units
            bytes_by_stage[action.stage] += units[action.option or 0]
    return bytes_by_stage
