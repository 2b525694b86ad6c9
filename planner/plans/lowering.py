"""A plan's schedule, turned into what each stage does in its first forward and before each backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.plans.plan import PlannedStage
from profiler.records import RecomputeMode
from solvers.problem.schedule import RUNS, TRANSFERS, Action, ActionKind, Schedule

_Phases = list[tuple[int, list[Action]]]  # each stage that goes backward, in order, with the actions before it


class UnsupportedPlan(ValueError):
    """A plan that the applier cannot carry out; says at which stage and why."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """Recompute a stage: keep nothing, keep (by an option; 0 keeps all), or stop once all is saved; hold its input."""

    stage: int
    mode: RecomputeMode
    hold: bool
    option: int = 0


class TransferMoment(NamedTuple):
    """When a transfer is due: moments compare in the order of the step.

    Attributes:
        backward: 0 in the first forward, 1 before a backward.
        stages: how many stages go forward, or backward, before it.
        reruns: in backward, how many reruns come directly before it.
    """

    backward: int
    stages: int
    reruns: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Send an offload unit, let go of it on the device, or bring it back.

    ``option`` says of which list of the stage it is one: with what the stage is kept, or None for its held input.
    """

    kind: ActionKind
    stage: int
    unit: int
    option: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredSchedule:
    """The runtime's work at each stage.

    Attributes:
        dropped: stages whose first forward keeps nothing.
        selective: stage -> option, for those whose first forward keeps a choice of what they save.
        holding_input: dropped stages whose linked input is held until they are run again.
        reruns: stage -> reruns before its backward, in order.
        input_releases: stage that is run again -> stages whose held input is let go before its backward.
        transfers: in order, each with the moment by which it is due.
        sending: stages of which something is sent, with the option that they are kept with; None while they wait to
            run again.
        backward_order: stage -> how many stages go backward before it.
    """

    dropped: frozenset[int]
    selective: dict[int, int]
    holding_input: frozenset[int]
    reruns: dict[int, tuple[Rerun, ...]]
    input_releases: dict[int, tuple[int, ...]]
    transfers: tuple[tuple[TransferMoment, Transfer], ...] = ()
    sending: frozenset[tuple[int, int | None]] = frozenset()
    backward_order: dict[int, int] = field(default_factory=dict)


def lower_schedule(stages: Sequence[PlannedStage], schedule: Schedule) -> LoweredSchedule:
    """Translate a schedule.

    Raises:
        UnsupportedPlan: it recomputes parts outside of stages, drops a boundary between stages that are not linked, or
            recomputes stages at a moment, or from an input, that the runtime does not have.
    """
    first, phases = _phases(schedule.actions)
    boundaries = _boundaries_after(set(), first)
    dropped = frozenset(a.stage for a in first if a.kind == "forward" and a.option is None)
    holding_input = frozenset(k for k in dropped if k - 1 in boundaries or not stages[k].record.links)
    reruns, input_releases, released_in_forward = _backwards(stages, phases, holding_input, boundaries)
    holding_input -= released_in_forward
    _check(stages, dropped, holding_input)
    transfers = tuple(_transfers(first, phases))
    return LoweredSchedule(
        dropped=dropped,
        selective={a.stage: a.option for a in first if a.kind == "forward" and a.option},
        holding_input=holding_input,
        reruns=reruns,
        input_releases=input_releases,
        transfers=transfers,
        sending=frozenset((transfer.stage, transfer.option) for _, transfer in transfers),
        backward_order={stage: number for number, (stage, _) in enumerate(phases)},
    )


def can_carry_out(stages: Sequence[PlannedStage], schedule: Schedule) -> bool:
    """Whether the runtime does what the schedule says, so that its peak is the one that replay says."""
    try:
        lower_schedule(stages, schedule)
    except UnsupportedPlan:
        return False
    return True


def _phases(actions: Sequence[Action]) -> tuple[list[Action], _Phases]:
    """The actions of the first forward, and those before each backward."""
    between: list[list[Action]] = [[]]
    backwards: list[int] = []
    for action in actions:
        if action.kind == "backward":
            backwards.append(action.stage)
            between.append([])
        else:
            between[-1].append(action)
    first, again = _split_at_second_runs(between[0])
    forward, waiting = _split_end(first)
    return forward, list(zip(backwards, [waiting + again, *between[1:-1]], strict=True))


def _split_at_second_runs(actions: list[Action]) -> tuple[list[Action], list[Action]]:
    """Split what comes before the first backward where a stage runs for the second time."""
    seen: set[int] = set()
    for position, action in enumerate(actions):
        if action.kind == "recompute" or (action.kind == "forward" and action.stage in seen):
            return actions[:position], actions[position:]
        if action.kind == "forward":
            seen.add(action.stage)
    return actions, []


def _split_end(actions: list[Action]) -> tuple[list[Action], list[Action]]:
    """Set apart what waits for backward: what is brought back after the last forward, and transfers after that.

    The runtime is not told when the loss is done.
    """
    last = max((i for i, action in enumerate(actions) if action.kind in RUNS), default=-1)
    waits = False
    forward, waiting = actions[: last + 1], []
    for action in actions[last + 1 :]:
        waits = waits or action.kind == "fetch"
        (waiting if waits and action.kind in TRANSFERS else forward).append(action)
    return forward, waiting


def _boundaries_after(boundaries: set[int], actions: Sequence[Action]) -> set[int]:
    """The stages whose output is alive after some actions."""
    alive = set(boundaries)
    for action in actions:
        if action.kind == "forward":
            alive.add(action.stage)
        elif action.kind == "free":
            alive.discard(action.stage)
    return alive


def _backwards(
    stages: Sequence[PlannedStage], phases: _Phases, holding_input: frozenset[int], boundaries: set[int]
) -> tuple[dict[int, tuple[Rerun, ...]], dict[int, tuple[int, ...]], set[int]]:
    """By the stage that goes backward: the reruns before it, and the stages whose held input goes then.

    The runtime is told only of backwards of stages that wait to run again. What the schedule lets go before another
    one, or before the reruns of this one, goes in the last of these before it; with none before it, in forward (third
    result).

    Raises:
        UnsupportedPlan: the runtime would run something later than the schedule does, or once more.
    """
    reruns: dict[int, tuple[Rerun, ...]] = {}
    in_forward: set[int] = set()
    releases: dict[int, set[int]] = {}
    moment = in_forward
    held = {k for k in holding_input if stages[k].record.links}
    for backward, actions in phases:
        boundaries = _boundaries_after(boundaries, actions)
        reruns[backward] = tuple(_rerun(a, boundaries) for a in actions if a.kind in RUNS)
        if reruns[backward] and all(rerun.stage != backward for rerun in reruns[backward]):
            again = stages[reruns[backward][0].stage].name
            raise _unsupported(
                f"{again!r} is recomputed before a stage that is not recomputed itself", stages[backward].name
            )
        begin = next((i for i, action in enumerate(actions) if action.kind in RUNS), len(actions))
        moment |= _let_go(held, actions[:begin])
        if reruns[backward]:
            moment = releases.setdefault(backward, set())
            moment |= _follow(stages, held, actions[begin:], iter(reruns[backward]), stages[backward].name)
    return reruns, {backward: tuple(sorted(released)) for backward, released in releases.items()}, in_forward


def _let_go(held: set[int], actions: Sequence[Action]) -> set[int]:
    """Take the stages whose input goes by these actions out of those that hold theirs."""
    released = {action.stage + 1 for action in actions if action.kind == "free"} & held
    held -= released
    return released


def _follow(
    stages: Sequence[PlannedStage], held: set[int], actions: Sequence[Action], reruns: Iterator[Rerun], backward: str
) -> set[int]:
    """Keep ``held`` up with the reruns before one backward, as the runtime carries them out; whose input goes at last.

    A rerun reads an input that is held, or the output of the rerun directly before it. Inputs go after all of them.
    """
    released: set[int] = set()
    latest: int | None = None  # the stage whose output is there
    for action in actions:
        if action.kind not in RUNS:
            released |= _let_go(held, [action])
            continue
        rerun = next(reruns)
        k, name = rerun.stage, stages[rerun.stage].name
        if released:
            raise _unsupported(
                f"the input of {stages[min(released)].name!r} is released before {name!r} is recomputed", backward
            )
        if stages[k].record.links and k not in held and latest != k - 1:
            raise _unsupported(f"{name!r} is not recomputed directly after the stage before it", backward)
        if rerun.mode != "drop":
            held.discard(k)
        elif rerun.hold and stages[k].record.links:
            held.add(k)
        latest = None if rerun.mode == "until_saved" else k
    return released


def _unsupported(problem: str, backward: str) -> UnsupportedPlan:
    return UnsupportedPlan(f"plan: {problem} (before the backward of stage {backward!r}); solve again")


def _rerun(action: Action, boundaries: set[int]) -> Rerun:
    if action.kind == "recompute" and not action.option:
        return Rerun(action.stage, "until_saved", False)
    if action.option is None:
        return Rerun(action.stage, "drop", action.stage - 1 in boundaries)
    return Rerun(action.stage, "keep", False, action.option)


def _transfers(first: Sequence[Action], phases: _Phases) -> Iterator[tuple[TransferMoment, Transfer]]:
    """Every transfer with its moment."""
    options: dict[int, int | None] = {}
    for number, (_, actions) in enumerate([(-1, first), *phases]):
        moment = TransferMoment(1, number - 1, 0) if number else TransferMoment(0, 0, 0)
        for action in actions:
            if action.kind in RUNS:
                options[action.stage] = action.option
                backward, stages, reruns = moment
                moment = TransferMoment(1, stages, reruns + 1) if backward else TransferMoment(0, stages + 1, 0)
            elif action.kind in TRANSFERS:
                assert action.option is not None
                yield moment, Transfer(action.kind, action.stage, action.option, options[action.stage])


def _check(stages: Sequence[PlannedStage], dropped: frozenset[int], holding_input: frozenset[int]) -> None:
    for k in sorted(dropped):
        stage = stages[k]
        if stage.kind != "stage":
            raise UnsupportedPlan(f"plan: {stage.name!r} lies outside of stages and cannot be recomputed; solve again")
        if k not in holding_input and (k - 1) not in dropped:
            raise UnsupportedPlan(
                f"plan: stage {stage.name!r} has no input to be recomputed from: it is not kept, and the stage before "
                "is not recomputed; solve again"
            )
