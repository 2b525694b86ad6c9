"""The decision of a plan for each stage of a profile, with its bytes, runs and seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from planner.plans.lowering import LoweredSchedule, can_carry_out, lower_schedule
from planner.plans.offload_request import input_offload_units, offload_units_among, sent_bytes
from planner.plans.plan import PlannedStage, StageDecision
from profiler.records import MenuRecord, OptionRecord, Profile
from solvers import Chain, Schedule
from solvers.problem.schedule import RUNS
from solvers.problem.simulator import Replay
from solvers.problem.solution import Accepts

_ROUNDING_SECONDS = 1e-12  # less is what sums leave


def undecided_stages(profile: Profile, gathered: Collection[int] = ()) -> list[PlannedStage]:
    """The planned stages independent of the schedule; everything else as for stages that are kept.

    Args:
        profile: whose stages they are.
        gathered: positions of those that keep their parameters gathered.
    """
    return [
        PlannedStage(record=record, input_offload_units=input_offload_units(profile, k), keeps_gathered=k in gathered)
        for k, record in enumerate(profile.stages)
    ]


def accepted_by(profile: Profile) -> Accepts:
    """Whether the profile's model can carry a schedule out."""
    return partial(can_carry_out, undecided_stages(profile))


def units_that_may_stay(profile: Profile) -> list[int]:
    """The stages whose parameters may stay gathered from forward to backward, the last one first.

    Those of later stages stay for a shorter time, and with none of them beside that does not end before theirs.
    """
    return [k for k in reversed(range(len(profile.stages))) if profile.stages[k].unit_bytes]


def with_units_gathered(chain: Chain, profile: Profile, gathered: Sequence[int]) -> Chain:
    """The chain where these stages keep their parameters: held from forward to backward, for one gather less."""
    stages = list(chain.stages)
    for k in gathered:
        record, stage = profile.stages[k], chain.stages[k]
        options = [
            replace(
                option,
                kept_bytes=option.kept_bytes + record.unit_bytes,
                backward_seconds=max(0.0, option.backward_seconds - record.gather_seconds),
            )
            for option in stage.options
        ]
        stages[k] = replace(
            stage,
            options=tuple(options),
            residue_bytes=stage.residue_bytes + record.unit_bytes,
            # There they stand as what had been gathered again.
            gradient_bytes=stage.gradient_bytes - record.unit_bytes,
        )
    return replace(chain, stages=tuple(stages))


def with_decisions(
    stages: Sequence[PlannedStage],
    menus: Sequence[MenuRecord],
    chain: Chain,
    schedule: Schedule,
    replayed: Replay,
) -> tuple[PlannedStage, ...]:
    """The stages with what ``schedule`` decides of each; those of another plan of the same chain will do.

    Raises:
        UnsupportedPlan: the schedule could not be applied.
    """
    lowered = lower_schedule(stages, schedule)
    runs = [action for action in schedule.actions if action.kind in RUNS]
    run_counts = Counter(action.stage for action in runs)
    last_options = {action.stage: action.option for action in runs if action.option is not None}
    sent = sent_bytes(chain, schedule)
    extra_seconds, extra_ops = _extra_runs(stages, menus, chain, replayed)
    decided: list[PlannedStage] = []
    for k, stage in enumerate(stages):
        decision = _decision(lowered, k, sends=k in sent)
        option, chosen = last_options.get(k) or 0, None
        if option:
            chosen = menus[stage.menu].options[option - 1]
            options = chain.stages[k].options
            extra_seconds[k] += options[option].backward_seconds - options[0].backward_seconds
            extra_ops[k] += chosen.ops_again
        decided.append(
            replace(
                stage,
                decision=decision,
                kept_bytes=_kept_bytes(stages, k, decision, chosen),
                runs=run_counts[k],
                extra_seconds=float(extra_seconds[k]),
                extra_ops=extra_ops[k],
                option=chain.stages[k].options[option].name if option else "",
                offload_units=_offload_units(stage, menus, chosen),
                offloaded_bytes=sent[k],
            )
        )
    return tuple(decided)


def _decision(lowered: LoweredSchedule, k: int, *, sends: bool) -> StageDecision:
    """Keep (and offload), recompute from a kept input, or (in a segment) from the stage before."""
    if k in lowered.dropped:
        return "recompute" if k in lowered.holding_input else "segment"
    if k in lowered.selective:
        return "selective"
    return "offload" if sends else "keep"


def _extra_runs(
    stages: Sequence[PlannedStage], menus: Sequence[MenuRecord], chain: Chain, replayed: Replay
) -> tuple[defaultdict[int, float], Counter[int]]:
    """Seconds of a stage's forward runs beyond one that keeps everything, and the ops of every run but its first."""
    extra_seconds: defaultdict[int, float] = defaultdict(float)
    extra_ops: Counter[int] = Counter()
    programs = _ops_of_programs(stages, menus, replayed)
    seen: set[int] = set()
    for moment in replayed.timeline:
        action = moment.action
        if action.kind not in RUNS:
            continue
        run_seconds = moment.seconds - moment.stall_seconds
        once_seconds = 0.0 if action.stage in seen else chain.stages[action.stage].options[0].forward_seconds
        if abs(run_seconds - once_seconds) > _ROUNDING_SECONDS:
            extra_seconds[action.stage] += run_seconds - once_seconds
        if action.stage in seen:
            # With an option inside it does not stop at its last saved tensor: see ``planner.plans.lowering``.
            stops = action.kind == "recompute" and not action.option
            record = stages[action.stage].record
            extra_ops[action.stage] += programs.get(action.stage) or (
                record.recompute_ops if stops else record.forward_ops
            )
        seen.add(action.stage)
    return extra_seconds, extra_ops


def _ops_of_programs(stages: Sequence[PlannedStage], menus: Sequence[MenuRecord], replayed: Replay) -> dict[int, int]:
    """How many ops the forward of each stage has that goes backward as a program."""
    actions = [moment.action for moment in replayed.timeline]
    chosen = {action.stage: action.option for action in actions if action.kind in RUNS and action.option}
    return {k: len(menus[stages[k].menu].options[option - 1].runs.forward) for k, option in chosen.items()}


def _offload_units(stage: PlannedStage, menus: Sequence[MenuRecord], chosen: OptionRecord | None) -> tuple[int, ...]:
    if stage.menu < 0 or not stage.record.recomputable or chosen is not None:
        return ()
    return offload_units_among(menus[stage.menu].ops, with_input=bool(stage.input_offload_units))


def _kept_bytes(stages: Sequence[PlannedStage], k: int, decision: StageDecision, chosen: OptionRecord | None) -> int:
    """Bytes this stage holds from forward to backward: what it saves, or its input, or nothing."""
    if decision == "selective" and chosen is not None:
        return max(0, stages[k].record.held_bytes - chosen.freed_bytes)
    if decision in ("keep", "offload"):
        return stages[k].record.held_bytes
    if decision == "recompute" and stages[k].record.links and k > 0:
        return stages[k - 1].record.boundary_bytes
    return 0
