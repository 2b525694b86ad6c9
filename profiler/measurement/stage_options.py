"""The choices inside stages that are measured: grouped by stages that are alike, spread over steps, and summed up."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from profiler.measurement.captured_stages import CapturedKind, StageCaptures
from profiler.measurement.meter import Mark, Place
from profiler.op_graph import Choice, ChoiceError, StageOps
from profiler.program_replay import forward_flow
from profiler.recomputation.op_schema import overload_of, traits_of
from profiler.recomputation.selection import Selection
from profiler.records import Phase
from profiler.trace.obstacles import GOES_BACKWARD
from profiler.trace.partition import ChosenStage
from profiler.trace.stage_dataflow import pooled, stage_ops_of, without_seconds
from profiler.trace.stage_names import StateChoices, names_outside, with_names
from profiler.trace.step_record import Trace
from profiler.workload.forward_patches import Forward
from profiler.workload.sharded_units import units_of

# Stages of one kind that together save less than this share are not worth the steps: they are kept or recomputed whole.
SMALLEST_SHARE = 0.01
ProposeChoices = Callable[[StageOps], Sequence[Choice]]
# Choices are so many that these steps run them all, the bytes of each once; stages that are alike share the work.
MEMORY_STEPS, TIME_STEPS = 3, 3
_UNLIKE = "run again, it did not give the same"
DISTRIBUTED = "its tensors are distributed (DTensor), and its ops are not recorded one by one"


@dataclass(slots=True)
class OptionGroup:
    """Stages that are alike, with the choices to measure on them.

    Attributes:
        ops: their common dataflow, seconds pooled.
        members: positions among the stages.
        choices: what to measure.
        most: how many choices there is room for; what a person asked for is measured beside them.
        family: groups with the same number do the same and differ in their neighbours only
            (at the ends of a chain gradients come and go otherwise): in bytes, not in seconds.
        turns: member -> turn; members with other turns run their choices in other steps. 0 for those not named.
        reason: why there are no choices; empty where there may be some.
        captured: what is known of the stages as a graph; None where that was not tried.
    """

    ops: StageOps
    members: list[int]
    choices: list[Choice] = field(default_factory=list)
    family: int = 0
    turns: dict[int, int] = field(default_factory=dict)
    most: int = sys.maxsize
    reason: str = ""
    captured: CapturedKind | None = None

    def capture(self, kind: CapturedKind) -> None:
        """The stages were captured: they are measured as a program."""
        self.captured = kind
        if kind.graph is not None:
            self.reason = ""
            self.choices = [PROGRAM]

    def take(self, proposed: Sequence[Choice]) -> None:
        """Measure what a person asked for, and of what else is proposed a choice that there is room for."""
        stated = [choice for choice in self.choices if choice.stated]
        asked = {choice.again for choice in stated}
        others = [choice for choice in proposed if choice.again not in asked]
        self.choices = [*stated, *spread_out(others, self.ops, self.most)]


@dataclass(slots=True)
class ChoiceCost:
    """What one choice was measured to cost.

    Attributes:
        freed_bytes: how much less a forward leaves alive than that of the unplanned stage.
        forward_peak_bytes, backward_peak_bytes: above what is alive at the phase's start.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    freed_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0


_UNITS_INSIDE = "its stage has units of fully_shard inside, whose parameters are there for their own calls only"
_CASTING = "one of its ops casts within its kernel under autocast, and does not where ops are recorded one by one"
PROGRAM = Choice("as a program", (), frozenset(), program=True)
# What the stages of one step do: stage -> (group, choice); choice ``KEEP`` is to keep everything.
Assignment = dict[int, tuple[int, int]]
KEEP = -1


def grouped(
    trace: Trace,
    stages: Sequence[ChosenStage],
    kinds: Sequence[int],
    plain: Mapping[Mark, list[Phase]],
    propose: ProposeChoices,
) -> list[OptionGroup]:
    """The groups of stages that do the same ops, on the same kinds of storages and in the same bytes, with choices.

    Args:
        trace, stages: the traced step and its stages.
        kinds: a number for each stage; equal where structure and shapes are equal.
        plain: the intervals of an unplanned step under the memory meter.
        propose: names the choices that are worth measuring.
    """
    groups: dict[tuple[int, StageOps], OptionGroup] = {}
    proposals: dict[int, Sequence[Choice]] = {}
    flows = [_rerunnable(stage_ops_of(trace, stage), stage) for stage in stages]
    for k, flow in enumerate(flows):
        groups.setdefault((kinds[k], without_seconds(flow)), OptionGroup(flow, [])).members.append(k)
    all_bytes = sum(group.ops.saved_bytes * len(group.members) for group in groups.values())
    for group in groups.values():
        group.ops = pooled([flows[k] for k in group.members])
        group.reason = _why_unrecorded(group, stages)
        if not group.reason and group.ops.saved_bytes * len(group.members) >= SMALLEST_SHARE * all_bytes:
            proposals[id(group)] = propose(group.ops)
    steps = MEMORY_STEPS - 1 if _neighbours_interfere([*groups.values()]) else MEMORY_STEPS
    parts: list[OptionGroup] = []
    for number, group in enumerate(groups.values()):
        for part in _parts(group, number, plain):
            part.most = steps * len(part.members)
            part.take(proposals.get(id(group), ()))
            parts.append(part)
    return parts


def _rerunnable(ops: StageOps, stage: ChosenStage) -> StageOps:
    """The ops, none to run again by itself where parameters come and go between them."""
    if not units_of(stage.call.module).inside:
        return ops
    return replace(ops, ops=tuple(replace(op, not_rerunnable_reason=_UNITS_INSIDE) for op in ops.ops))


def _why_unrecorded(group: OptionGroup, stages: Sequence[ChosenStage]) -> str:
    """Why the ops of these stages cannot be recorded one by one; empty where they can."""
    if any(stages[k].call.goes_backward for k in group.members):
        return GOES_BACKWARD
    if any(stages[k].call.distributed for k in group.members):
        return DISTRIBUTED
    return _CASTING if any(traits_of(overload_of(op.op)).casts for op in group.ops.ops) else ""


def take_stated(
    groups: Sequence[OptionGroup], trace: Trace, stages: Sequence[ChosenStage], state: StateChoices
) -> None:
    """Have what a person asks for inside opaque stages measured; programs of captured ones need not be.

    Args:
        groups: of all stages, captured where that is possible.
        trace, stages: the traced step and its stages.
        state: names the choices that a person asks for.

    Raises:
        ChoiceError: what a person asks for cannot be.
    """
    flows = {k: _flow_of(group) for group in groups for k in group.members}
    named = with_names(trace, stages, [flows[k] for k in range(len(stages))])
    stated = state(named, names_outside(trace, stages))
    for group in groups:
        asked = {stated[k].again: stated[k] for k in group.members if k in stated}
        if not asked or (group.captured is not None and group.captured.graph is not None):
            continue
        if group.reason:
            raise ChoiceError(
                f"rules: expected whole stages, got a choice of ops inside {stages[group.members[0]].name!r}: "
                f"{group.reason}; state it for the whole stage"
            )
        others = [choice for choice in group.choices if choice.again not in asked]
        group.choices = list(asked.values())
        group.take(others)


def _flow_of(group: OptionGroup) -> StageOps:
    """The ops of a group's stages as a person can name them."""
    graph = None if group.captured is None else group.captured.graph
    return group.ops if graph is None else replace(forward_flow(graph), modules=group.ops.modules)


def spread_out(choices: Sequence[Choice], ops: StageOps, most: int) -> list[Choice]:
    """So many of the choices, from those that free little to those that free most; first go those that seem beaten.

    >>> spread_out([], StageOps(ops=(), storages=()), 3)
    []
    """
    if len(choices) <= most:
        return list(choices)
    cost = {choice.again: (_seconds_of(choice, ops), -_freed_bytes(choice, ops)) for choice in choices}
    ordered = sorted(choices, key=lambda choice: (cost[choice.again][1], cost[choice.again][0]))
    useful: list[Choice] = []
    for choice in ordered:  # Each frees less than those before: it has to be faster than all of them.
        if all(cost[choice.again][0] < cost[other.again][0] for other in useful):
            useful.append(choice)
    others = [choice for choice in ordered if choice not in useful]
    if len(useful) <= most:
        chosen = [*useful, *others[: most - len(useful)]]
    else:
        chosen = [useful[place * len(useful) // most] for place in range(most)]
    return [choice for choice in choices if choice in chosen]


def _seconds_of(choice: Choice, ops: StageOps) -> float:
    rerun_seconds = sum(ops.ops[ordinal].seconds for ordinal in choice.rerun - choice.packed)
    return rerun_seconds + sum(ops.packing_seconds(ordinal) for ordinal in choice.packed)


def _freed_bytes(choice: Choice, ops: StageOps) -> int:
    return ops.saved_bytes - sum(ops.storages[number].size_bytes for number in choice.kept)


def _parts(group: OptionGroup, family: int, plain: Mapping[Mark, list[Phase]]) -> list[OptionGroup]:
    """The group, split where the bytes of its stages' phases differ."""
    parts: dict[tuple[int, ...], OptionGroup] = {}
    for k in group.members:
        phases = [plain.get(mark, []) for mark in marks_of(k)]
        bytes_of = tuple(number for phase in phases for number in (growth_of(phase), peak_of(phase)))
        parts.setdefault(
            bytes_of, OptionGroup(group.ops, [], list(group.choices), family, reason=group.reason)
        ).members.append(k)
    return list(parts.values())


def take_turns(groups: Sequence[OptionGroup], stages: Sequence[ChosenStage], storing: Collection[int]) -> None:
    """Give calls of one module a turn each where it stores tensors of its forward.

    A call lets go of what the one before it stored: choices of both, in one step, would show in the bytes of the later.
    """
    calls: Counter[nn.Module] = Counter()
    turns = {}
    for k in sorted(storing):
        turns[k] = calls[stages[k].call.module]
        calls[stages[k].call.module] += 1
    for group in groups:
        group.turns = {k: turns[k] for k in group.members if k in turns}


def at_fault(ops: StageOps, rerun: Collection[int], wrong: Collection[int]) -> set[int]:
    """Those of the ops that gave something else again which did not merely read what another one of them makes."""
    faulty: set[int] = set()
    spoilt: set[int] = set()
    for ordinal in sorted(rerun):
        op = ops.ops[ordinal]
        misled = any(number in spoilt and number not in op.writes for number, _ in op.reads)
        if ordinal in wrong and not misled:
            faulty.add(ordinal)
        if ordinal in wrong or misled:
            spoilt |= {*op.allocates, *op.writes}
    return faulty


def unforced(group: OptionGroup) -> list[Choice]:
    """The choices of ops that run again in which none does that must not."""
    return [
        choice
        for choice in group.choices
        if not choice.program
        and not any(group.ops.ops[ordinal].not_rerunnable_reason for ordinal in choice.rerun - choice.packed)
    ]


def without(group: OptionGroup, wrong: set[int], propose: ProposeChoices) -> None:
    """Give the group choices in which none of these ops runs again: they do not give the same again.

    Raises:
        ChoiceError: a person asked for a choice with one of them.
    """
    for choice in unforced(group):
        for ordinal in sorted(choice.rerun & wrong):
            if choice.stated:
                raise ChoiceError(
                    f"op {ordinal} ({group.ops.ops[ordinal].op}): expected one that gives the same when it runs again, "
                    "got another result (something out of torch's sight writes to it); keep what it makes"
                )
    ops = [
        replace(op, not_rerunnable_reason=op.not_rerunnable_reason or _UNLIKE) if k in wrong else op
        for k, op in enumerate(group.ops.ops)
    ]
    group.ops = replace(group.ops, ops=tuple(ops))
    group.take(propose(group.ops))


def capture_groups(groups: Sequence[OptionGroup], captures: StageCaptures) -> None:
    """Capture the stages of groups that save enough, those of one family together."""
    all_bytes = sum(group.ops.saved_bytes * len(group.members) for group in groups)
    for family in families_of(groups):
        if family.ops.saved_bytes * len(family.members) >= SMALLEST_SHARE * all_bytes:
            kind = captures.capture(family.members)
            for group in groups:
                if group.family == family.family:
                    group.capture(kind)


def families_of(groups: Sequence[OptionGroup]) -> list[OptionGroup]:
    """One group per family, with all its members and all their choices."""
    families: dict[int, OptionGroup] = {}
    for group in groups:
        family = families.setdefault(
            group.family, OptionGroup(group.ops, [], [], group.family, captured=group.captured)
        )
        family.members = sorted([*family.members, *group.members])
        known = {choice.again for choice in family.choices}
        family.choices += [choice for choice in group.choices if choice.again not in known]
    return list(families.values())


def steps_for(groups: Sequence[OptionGroup]) -> int:
    """How many steps the measurement takes."""
    timed = len(time_assignments(families_of(groups)))
    return len(memory_assignments(groups)) + timed * rounds_for(timed)


def memory_assignments(groups: Sequence[OptionGroup]) -> list[Assignment]:
    """Steps in which every choice is run once; stages that are alike share the work.

    Never two neighbouring stages in one step where what the first keeps is the
    second's input: there a choice of the first would show in the bytes of the second.
    The same for stages that take turns.
    """
    assignments = _spread(groups, [list(range(len(group.choices))) for group in groups], 0)
    if _neighbours_interfere(groups):
        assignments = [{k: v for k, v in step.items() if k % 2 == odd} for step in assignments for odd in (0, 1)]
    turn_of = {k: group.turns.get(k, 0) for group in groups for k in group.members}
    turns = range(max(turn_of.values(), default=0) + 1)
    assignments = [{k: v for k, v in step.items() if turn_of[k] == turn} for step in assignments for turn in turns]
    return [step for step in assignments if step]


def time_assignments(families: Sequence[OptionGroup], shift: int = 0) -> list[Assignment]:
    """The same; stages without a choice in a step keep everything, and show in it what the others are held against.

    Args:
        families: of ``families_of``; neighbours do not matter to seconds.
        shift: turns which stage takes which choice.
    """
    steps = _spread(families, [list(range(len(group.choices))) for group in families], shift)
    members = [(k, number, group) for number, group in enumerate(families) for k in group.members]
    return [{k: step.get(k, (number, _else_of(group))) for k, number, group in members} for step in steps]


def _else_of(group: OptionGroup) -> int:
    """What stages do in timed steps that measure no other choice on them."""
    return group.choices.index(PROGRAM) if PROGRAM in group.choices else KEEP


def _spread(groups: Sequence[OptionGroup], choices: Sequence[Sequence[int]], shift: int) -> list[Assignment]:
    steps = max(
        (-(-len(numbers) // len(group.members)) for numbers, group in zip(choices, groups, strict=True)), default=0
    )
    assignments: list[Assignment] = [{} for _ in range(steps)]
    for number, group in enumerate(groups):
        width = len(group.members)
        for place, choice in enumerate(choices[number]):
            assignments[place // width][group.members[(place + shift) % width]] = (number, choice)
    return assignments


def _neighbours_interfere(groups: Sequence[OptionGroup]) -> bool:
    """Whether a stage keeps what it returns while the next one, that takes it, does not."""
    flows = {k: group.ops for group in groups for k in group.members}
    keeps = {k for k, ops in flows.items() if any(s.saved and s.returned and s.op >= 0 for s in ops.storages)}
    takes = {k for k, ops in flows.items() if any(s.dies_after_stage and not s.always_live for s in ops.storages)}
    return any(k + 1 in takes for k in keeps)


def selections(groups: Sequence[OptionGroup], assignment: Assignment) -> dict[int, Selection | Forward]:
    """How each stage of one step runs, by a selection or instead of its own forward; none that keeps everything."""
    chosen = {k: (groups[g], groups[g].choices[c]) for k, (g, c) in assignment.items() if c != KEEP}
    return {k: _way_to_run(group, k, choice) for k, (group, choice) in chosen.items()}


def _way_to_run(group: OptionGroup, k: int, choice: Choice) -> Selection | Forward:
    if choice.program:
        assert group.captured is not None
        captured = group.captured
        return lambda *args, **kwargs: captured.run(k, args, kwargs)
    return Selection.of(group.ops, *choice.again)


def rounds_for(steps: int) -> int:
    """How often the steps are repeated for timing."""
    return max(1, TIME_STEPS // max(1, steps))


def marks_of(stage: int) -> tuple[Mark, Mark]:
    """Where a stage's forward and its backward begin."""
    return Mark("forward", Place("stage", stage)), Mark("backward", Place("stage", stage))


def growth_of(phases: Sequence[Phase]) -> int:
    """How much more is alive after phases that follow each other than before them."""
    return phases[-1].end_bytes - phases[0].start_bytes if phases else 0


def peak_of(phases: Sequence[Phase]) -> int:
    """The most bytes in phases that follow each other, above those at their start."""
    return max((phase.peak_bytes for phase in phases), default=0) - (phases[0].start_bytes if phases else 0)
