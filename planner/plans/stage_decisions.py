"""What a schedule means for each stage of a profile: its decision, bytes, runs and seconds, by the stage's name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from planner.plans.offloadable import input_offload_units, offload_units_among, sent_bytes
from planner.plans.plan import Decision, PlannedStage
from profiler.records import MenuRecord, Profile
from solvers import Chain, Schedule
from solvers.problem.chain_simulator import Replay


def planned_stages(profile: Profile, chain: Chain, schedule: Schedule, replayed: Replay) -> tuple[PlannedStage, ...]:
    """One entry per stage of the profile, for the plan."""
    bare = [_bare_stage(profile, k) for k in range(len(profile.stages))]
    return with_decisions(bare, profile.menus, chain, schedule, replayed)


def _bare_stage(profile: Profile, k: int) -> PlannedStage:
    """What a plan says of a stage whatever its schedule is; the rest as for a stage that is kept."""
    record = profile.stages[k]
    inside = record.kind == "stage"
    return PlannedStage(
        name=record.name,
        kind=record.kind,
        module_class=record.module_class,
        decision="keep",
        kept_bytes=0,
        runs=1,
        extra_seconds=0.0,
        extra_ops=0,
        links=record.links,
        input_shapes=record.input_shapes,
        parameter_shapes=record.parameter_shapes,
        mutated_buffers=record.mutated_buffers,
        menu=record.menu,
        recomputable=record.recomputable,
        input_offload_units=input_offload_units(profile, k),
        forward_ops=record.forward_ops,
        recompute_ops=record.recompute_ops,
        saved_bytes=record.kept_bytes if inside else max(0, record.forward.end_bytes - record.forward.start_bytes),
        boundary_bytes=record.boundary_bytes,
    )


def with_decisions(
    stages: Sequence[PlannedStage],
    menus: Sequence[MenuRecord],
    chain: Chain,
    schedule: Schedule,
    replayed: Replay,
) -> tuple[PlannedStage, ...]:
    """The stages with what ``schedule`` decides of each; those of another plan of the same chain will do."""
    runs = Counter(a.stage for a in schedule.actions if a.kind in ("forward", "recompute"))
    again, extra_ops = _extra_runs(stages, replayed)
    decisions = _decisions(stages, schedule)
    chosen = _chosen_options(chain, schedule)
    sent = sent_bytes(chain, schedule)
    for k, extra in _inner_seconds(chain, schedule, decisions).items():
        again[k] = again.get(k, 0.0) + extra
    for k, option in chosen.items():
        extra_ops[k] += len(menus[stages[k].menu].options[option - 1].rerun)
    return tuple(
        replace(
            stage,
            decision=decisions[k],
            kept_bytes=_kept_bytes(stages, decisions[k], menus, k, chosen.get(k, 0)),
            runs=runs[k],
            extra_seconds=float(again.get(k, 0.0)),
            extra_ops=extra_ops[k],
            option=chain.stages[k].options[chosen[k]].name if k in chosen else "",
            offload_units=_offload_units(stage, menus, chosen.get(k, 0)),
            offloaded_bytes=sent[k],
        )
        for k, stage in enumerate(stages)
    )


def _extra_runs(stages: Sequence[PlannedStage], replayed: Replay) -> tuple[dict[int, float], Counter[int]]:
    """Seconds and ops of every run of a stage but its first."""
    again: dict[int, float] = {}
    extra_ops: Counter[int] = Counter()
    seen: set[int] = set()
    for moment in replayed.timeline:
        action = moment.action
        if action.kind not in ("forward", "recompute"):
            continue
        if action.stage in seen:
            again[action.stage] = again.get(action.stage, 0.0) + moment.seconds - moment.stall_seconds
            # With an option inside it does not stop at its last saved tensor: see ``planner.plans.lowering``.
            stops = action.kind == "recompute" and not action.option
            stage = stages[action.stage]
            extra_ops[action.stage] += stage.recompute_ops if stops else stage.forward_ops
        seen.add(action.stage)
    return again, extra_ops


def _offload_units(stage: PlannedStage, menus: Sequence[MenuRecord], option: int) -> tuple[int, ...]:
    if stage.menu < 0 or not stage.recomputable:
        return ()
    menu = menus[stage.menu]
    chosen = menu.options[option - 1] if option else None
    return offload_units_among(menu.ops, chosen, with_input=bool(stage.input_offload_units))


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


def _decisions(stages: Sequence[PlannedStage], schedule: Schedule) -> list[Decision]:
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
    for k, stage in enumerate(stages):
        if first.get(k, 0) is not None:
            found.append("selective" if first.get(k) else "offload" if k in sent else "keep")
        else:
            found.append("segment" if stage.links and k - 1 in freed else "recompute")
    return found


def _kept_bytes(
    stages: Sequence[PlannedStage], decision: Decision, menus: Sequence[MenuRecord], k: int, option: int
) -> int:
    """Bytes this stage holds from forward to backward: what it saves, or its input, or nothing."""
    stage = stages[k]
    if decision == "selective":
        return max(0, stage.saved_bytes - menus[stage.menu].options[option - 1].freed_bytes)
    if decision in ("keep", "offload"):
        return stage.saved_bytes
    if decision == "recompute" and stage.links and k > 0:
        return stages[k - 1].boundary_bytes
    return 0
