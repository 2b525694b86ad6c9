"""What a schedule means for each stage of a profile: its decision, bytes, runs and seconds, by the stage's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planner.parcels import input_parcels, kept_parcels, sent_bytes
from planner.plan import Decision, PlannedStage
from profiler.records import OptionRecord, Profile, StageRecord
from solvers import Chain, Schedule
from solvers.simulator import Replay


def planned_stages(profile: Profile, chain: Chain, schedule: Schedule, replayed: Replay) -> tuple[PlannedStage, ...]:
    """One entry per stage of the profile, for the plan."""
    runs = Counter(a.stage for a in schedule.actions if a.kind in ("forward", "recompute"))
    again: Counter[int] = Counter()
    extra_ops: Counter[int] = Counter()
    seen: set[int] = set()
    for moment in replayed.timeline:
        action, record = moment.action, profile.stages[moment.action.stage]
        if action.kind not in ("forward", "recompute"):
            continue
        if action.stage in seen:
            again[action.stage] += moment.seconds - moment.stall_seconds  # type: ignore[assignment]  # Counter adds floats as well.
            # With an option inside it does not stop at its last saved tensor: see ``planner.program``.
            stops = action.kind == "recompute" and not action.option
            extra_ops[action.stage] += record.recompute_ops if stops else record.forward_ops
        seen.add(action.stage)
    decisions = _decisions(profile.stages, schedule)
    chosen = _chosen_options(chain, schedule)
    sent = sent_bytes(chain, schedule)
    for k, extra in _inner_seconds(chain, schedule, decisions).items():
        again[k] += extra  # type: ignore[assignment]
    for k, ops in _inner_ops(profile, chain, schedule).items():
        extra_ops[k] += ops
    return tuple(
        PlannedStage(
            name=record.name,
            kind=record.kind,
            module_class=record.module_class,
            decision=decisions[k],
            kept_bytes=_kept_bytes(record, decisions[k], profile, k, chosen.get(k, 0)),
            runs=runs[k],
            extra_seconds=float(again[k]),
            extra_ops=extra_ops[k],
            links=record.links,
            input_shapes=record.input_shapes,
            parameter_shapes=record.parameter_shapes,
            mutated_buffers=record.mutated_buffers,
            option=chain.stages[k].options[chosen[k]].name if k in chosen else "",
            menu=record.menu,
            recomputable=record.recomputable,
            parcels=kept_parcels(profile, k, _option_record(profile, k, chosen.get(k, 0))),
            input_parcels=input_parcels(profile, k),
            offloaded_bytes=sent[k],
        )
        for k, record in enumerate(profile.stages)
    )


def _option_record(profile: Profile, k: int, option: int) -> OptionRecord | None:
    return profile.menus[profile.stages[k].menu].options[option - 1] if option else None


def _chosen_options(chain: Chain, schedule: Schedule) -> dict[int, int]:
    """The option inside the stage that each selective stage goes backward with."""
    found: dict[int, int] = {}
    for action in schedule.actions:
        if action.kind in ("forward", "recompute") and action.option is not None:
            found[action.stage] = action.option
    return {k: option for k, option in found.items() if option}


def _inner_seconds(chain: Chain, schedule: Schedule, decisions: Sequence[Decision]) -> dict[int, float]:
    """Seconds that running ops again inside a stage adds to its backward, and to its forward where it runs once."""
    found = {}
    for k, option in _chosen_options(chain, schedule).items():
        keep, chosen = chain.stages[k].options[0], chain.stages[k].options[option]
        found[k] = chosen.backward_seconds - keep.backward_seconds
        if decisions[k] == "selective":
            found[k] += chosen.forward_seconds - keep.forward_seconds
    return found


def _inner_ops(profile: Profile, chain: Chain, schedule: Schedule) -> dict[int, int]:
    options = _chosen_options(chain, schedule)
    return {k: len(profile.menus[profile.stages[k].menu].options[option - 1].rerun) for k, option in options.items()}


def _decisions(records: tuple[StageRecord, ...], schedule: Schedule) -> list[Decision]:
    """Keep (and offload), recompute from a kept input, or (in a segment) from the stage before."""
    first: dict[int, int | None] = {}
    freed: set[int] = set()
    for action in schedule.actions:
        if action.kind == "backward" or (action.kind == "forward" and action.stage in first):
            break
        if action.kind == "recompute":
            break
        if action.kind == "forward":
            first[action.stage] = action.option
        elif action.kind == "free":
            freed.add(action.stage)
    found: list[Decision] = []
    sent = {action.stage for action in schedule.actions if action.kind == "offload"}
    for k, record in enumerate(records):
        if first.get(k, 0) is not None:
            found.append("selective" if first.get(k) else "offload" if k in sent else "keep")
        else:
            found.append("segment" if record.links and k - 1 in freed else "recompute")
    return found


def _kept_bytes(record: StageRecord, decision: Decision, profile: Profile, k: int, option: int) -> int:
    """Bytes this stage holds from forward to backward: what it saves, or its input, or nothing."""
    if decision == "selective":
        return max(0, record.kept_bytes - profile.menus[record.menu].options[option - 1].freed_bytes)
    if decision in ("keep", "offload"):
        return (
            record.kept_bytes
            if record.kind == "stage"
            else max(0, record.forward.end_bytes - record.forward.start_bytes)
        )
    if decision == "recompute" and record.links and k > 0:
        return profile.stages[k - 1].boundary_bytes
    return 0
