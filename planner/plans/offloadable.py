"""Offload units: what a stage holds between forward and backward and may send to host memory."""

from __future__ import annotations

from collections import Counter

from profiler.op_graph import StageOps
from profiler.records import OptionRecord, Profile
from solvers import Chain, Schedule
from solvers.problem.chain_schedule import RUNS

# Less than a page is not worth a copy and the memory of its host buffer.
SMALLEST_OFFLOAD_UNIT_BYTES = 4096


def kept_offload_units(profile: Profile, k: int, option: OptionRecord | None) -> tuple[int, ...]:
    """Storages (numbers in the stage's ``StageOps``) that may be offloaded while stage ``k`` is kept, one unit each.

    What the stage makes and keeps for its own backward alone, and its input where nothing else needs it: no parameter,
    nothing that other stages hold or that the model was handed, nothing smaller than a page. Of a stage that was not
    seen to run a second time and leave nothing behind, nothing: what it stores somewhere would not go from the device.

    Args:
        profile: of the model.
        k: position of the stage.
        option: what is kept of it; None for everything.
    """
    record = profile.stages[k]
    if record.menu < 0 or not record.recomputable:
        return ()
    return offload_units_among(profile.menus[record.menu].ops, option, with_input=bool(input_offload_units(profile, k)))


def offload_units_among(ops: StageOps, option: OptionRecord | None, *, with_input: bool) -> tuple[int, ...]:
    """``kept_offload_units`` by a stage's ops alone; ``with_input``: its input, too, lives for this stage alone."""
    if not ops.saves or (option is not None and option.runs is not None):
        return ()  # What autograd saves would not be recognised; and what programs keep is not sent.
    kept = _saved(ops) if option is None else _held(ops, option)
    units = {
        number
        for number, storage in enumerate(ops.storages)
        if storage.size_bytes >= SMALLEST_OFFLOAD_UNIT_BYTES
        and not storage.returned
        and (
            (storage.op >= 0 and number in kept and not storage.always_live)
            or (storage.dies_after_stage and with_input and (number in ops.saves or number in kept))
        )
    }
    return tuple(sorted(units - _indistinguishable(ops, option, units)))


def _indistinguishable(ops: StageOps, option: OptionRecord | None, wanted: set[int]) -> set[int]:
    """Those that a run cannot tell from others, which must stay.

    What autograd saves is known by its place among what it saves; what only ops that run again hold, by them.
    """
    alike: dict[tuple[frozenset[int], int], set[int]] = {}
    for number, readers in (ops.held_for(*option.again) if option is not None else {}).items():
        if number not in ops.saves:
            alike.setdefault((readers, ops.storages[number].size_bytes), set()).add(number)
    return {number for numbers in alike.values() if not numbers <= wanted for number in numbers}


def _saved(ops: StageOps) -> set[int]:
    return {number for number in ops.saves if number >= 0}


def _held(ops: StageOps, option: OptionRecord) -> set[int]:
    """What somebody holds under an option: autograd, or an op that runs again. An option may name more than that.

    All that an op to run again makes is made again, kept or not: the statistics of a norm beside its output.
    """
    remade = {number for ordinal in option.rerun for number in (*ops.ops[ordinal].allocates, *ops.ops[ordinal].writes)}
    return set(option.kept) & (_saved(ops) | set(ops.held_for(*option.again))) - remade


def kept_offload_unit_bytes(profile: Profile, k: int, option: OptionRecord | None) -> tuple[int, ...]:
    """Bytes of each of ``kept_offload_units``."""
    numbers = kept_offload_units(profile, k, option)
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
