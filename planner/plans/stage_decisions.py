"""What a schedule decides of each stage of a profile, with the bytes, runs and seconds that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from planner.plans.offloadable import input_offload_units, offload_units_among, sent_bytes
from planner.plans.plan import PlannedStage, StageDecision
from profiler.records import MenuRecord, Profile
from solvers import Chain, Option, Schedule
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
    extra_seconds, extra_ops = _extra_runs(stages, replayed)
    decisions = _decisions(stages, schedule)
    chosen = _chosen_options(schedule)
    sent = sent_bytes(chain, schedule)
    for k, option in chosen.items():
        inner_seconds = _inner_seconds(chain.stages[k].options, option, decisions[k])
        extra_seconds[k] = extra_seconds.get(k, 0.0) + inner_seconds
        extra_ops[k] += len(menus[stages[k].menu].options[option - 1].rerun)
    return tuple(
        replace(
            stage,
            decision=decisions[k],
            kept_bytes=_kept_bytes(stages, decisions[k], menus, k, chosen.get(k, 0)),
            runs=runs[k],
            extra_seconds=float(extra_seconds.get(k, 0.0)),
            extra_ops=extra_ops[k],
            option=chain.stages[k].options[chosen[k]].name if k in chosen else "",
            offload_units=_offload_units(stage, menus, chosen.get(k, 0)),
            offloaded_bytes=sent[k],
        )
        for k, stage in enumerate(stages)
    )


def _extra_runs(stages: Sequence[PlannedStage], replayed: Replay) -> tuple[dict[int, float], Counter[int]]:
    """Seconds and ops of every run of a stage but its first."""
    extra_seconds: dict[int, float] = {}
    extra_ops: Counter[int] = Counter()
    seen: set[int] = set()
    for moment in replayed.timeline:
        action = moment.action
        if action.kind not in ("forward", "recompute"):
            continue
        if action.stage in seen:
            seconds = extra_seconds.get(action.stage, 0.0)
            extra_seconds[action.stage] = seconds + moment.seconds - moment.stall_seconds
            # With an option inside it does not stop at its last saved tensor: see ``planner.plans.lowering``.
            stops = action.kind == "recompute" and not action.option
            stage = stages[action.stage]
            extra_ops[action.stage] += stage.recompute_ops if stops else stage.forward_ops
        seen.add(action.stage)
    return extra_seconds, extra_ops


def _offload_units(stage: PlannedStage, menus: Sequence[MenuRecord], option: int) -> tuple[int, ...]:
    if stage.menu < 0 or not stage.recomputable:
        return ()
    menu = menus[stage.menu]
    chosen = menu.options[option - 1] if option else None
    return offload_units_among(menu.ops, chosen, with_input=bool(stage.input_offload_units))


def _chosen_options(schedule: Schedule) -> dict[int, int]:
    """The option inside the stage that each selective stage goes backward with."""
    options: dict[int, int] = {}
    for action in schedule.actions:
        if action.kind in ("forward", "recompute") and action.option is not None:
            options[action.stage] = action.option
    return {k: option for k, option in options.items() if option}


def _inner_seconds(options: Sequence[Option], option: int, decision: StageDecision) -> float:
    """Seconds that running ops again inside a stage adds to its backward, and to its forward where it runs once."""
    keep, chosen = options[0], options[option]
    backward_seconds = chosen.backward_seconds - keep.backward_seconds
    return backward_seconds + (chosen.forward_seconds - keep.forward_seconds if decision == "selective" else 0.0)


def _decisions(stages: Sequence[PlannedStage], schedule: Schedule) -> list[StageDecision]:
    """Keep (and offload), recompute from a kept input, or (in a segment) from the stage before."""
    first: dict[int, int | None] = {}
    freed: set[int] = set()
    for action in schedule.actions:
        if action.kind in ("backward", "recompute") or (action.kind == "forward" and action.stage in first):
            break
        if action.kind == "forward":
            first[action.stage] = action.option
        elif action.kind == "free":
            freed.add(action.stage)
    sent = {action.stage for action in schedule.actions if action.kind == "offload"}
    decisions: list[StageDecision] = []
    for k, stage in enumerate(stages):
        if first.get(k, 0) is not None:
            decisions.append("selective" if first.get(k) else "offload" if k in sent else "keep")
        else:
            decisions.append("segment" if stage.links and k - 1 in freed else "recompute")
    return decisions


def _kept_bytes(
    stages: Sequence[PlannedStage], decision: StageDecision, menus: Sequence[MenuRecord], k: int, option: int
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
