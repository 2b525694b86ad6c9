"""Programs: a plan's schedule, turned into what each stage does in forward and before each backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planner.plans.plan import PlannedStage
from solvers.problem.chain_schedule import TRANSFERS, Action, ActionKind, Schedule

RerunMode = Literal["drop", "keep", "until_saved"]
# Forward (0) or backward (1), how many of it come before, and in backward how many reruns directly before it.
TransferMoment = tuple[int, int, int]
_RUNS = ("forward", "recompute")


class UnsupportedPlan(ValueError):
    """A plan that the applier cannot carry out; says at which stage and why."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """Run a stage again: keep nothing, keep (by an option; 0 keeps all), or stop once all is saved; hold its input."""

    stage: int
    mode: RerunMode
    hold: bool
    option: int = 0


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
    """What to do.

    Attributes:
        dropped: stages whose first forward keeps nothing.
        selective: stage -> option, for those whose first forward keeps a choice of what they save.
        holding: those of them whose linked input is held until they are run again.
        before_backward: stage -> reruns before its backward, in order.
        releases: stage -> stages whose held input is let go before that backward.
        transfers: what travels, each with the moment by which it is its turn, in order.
        travelling: stages of which something does, with the option that they are kept with; None while they wait.
        order: stage -> how many stages go backward before it.
    """

    dropped: frozenset[int]
    selective: dict[int, int]
    holding: frozenset[int]
    before_backward: dict[int, tuple[Rerun, ...]]
    releases: dict[int, tuple[int, ...]]
    transfers: tuple[tuple[TransferMoment, Transfer], ...] = ()
    travelling: frozenset[tuple[int, int | None]] = frozenset()
    order: dict[int, int] = field(default_factory=dict)


def lowered(stages: Sequence[PlannedStage], schedule: Schedule) -> LoweredSchedule:
    """Translate a schedule.

    Raises:
        UnsupportedPlan: it reruns what lies outside of stages, or drops a
            boundary between stages that are not linked.
    """
    first, phases = _phases(schedule.actions)
    alive = _alive_after(set(), first)
    dropped = {a.stage for a in first if a.kind == "forward" and a.option is None}
    selective = {a.stage: a.option for a in first if a.kind == "forward" and a.option}
    holding = {k for k in dropped if k - 1 in alive or not stages[k].links}
    _check(stages, dropped, holding)
    before: dict[int, tuple[Rerun, ...]] = {}
    releases: dict[int, tuple[int, ...]] = {}
    pending = set(dropped)
    for backward, actions in phases:
        boundaries = _alive_after(alive, actions)
        before[backward] = tuple(_rerun(a, boundaries) for a in actions if a.kind in _RUNS)
        pending -= {rerun.stage for rerun in before[backward] if rerun.mode != "drop"}
        gone = {k for k in pending if k < backward and stages[k].links and k - 1 in alive and k - 1 not in boundaries}
        releases[backward] = tuple(sorted(gone))
        alive = boundaries
    transfers = tuple(_transfers(first, phases))
    return LoweredSchedule(
        dropped=frozenset(dropped),
        selective=selective,
        holding=frozenset(holding),
        before_backward=before,
        releases=releases,
        transfers=transfers,
        travelling=frozenset((each.stage, each.option) for _, each in transfers),
        order={backward: number for number, (backward, _) in enumerate(phases)},
    )


def _transfers(
    first: Sequence[Action], phases: Sequence[tuple[int, list[Action]]]
) -> Iterator[tuple[TransferMoment, Transfer]]:
    """What travels, with its moment: after how many first forwards, or before which backward."""
    moment: TransferMoment = (0, 0, 0)
    options: dict[int, int | None] = {}
    for number, (_, actions) in enumerate([(None, first), *phases]):
        if number:
            moment = (1, number - 1, 0)
        for action in actions:
            if action.kind in _RUNS:
                options[action.stage] = action.option
                moment = (1, moment[1], moment[2] + 1) if number else (0, moment[1] + 1, 0)
            elif action.kind in TRANSFERS:
                assert action.option is not None
                yield moment, Transfer(action.kind, action.stage, action.option, options[action.stage])


def _phases(actions: Sequence[Action]) -> tuple[list[Action], list[tuple[int, list[Action]]]]:
    """The first forward, and per backward the actions since the one before."""
    stretches: list[list[Action]] = [[]]
    backwards: list[int] = []
    for action in actions:
        if action.kind == "backward":
            backwards.append(action.stage)
            stretches.append([])
        else:
            stretches[-1].append(action)
    first, again = _split_first(stretches[0])
    forward, waiting = _split_end(first)
    return forward, list(zip(backwards, [waiting + again, *stretches[1:-1]], strict=True))


def _split_end(actions: list[Action]) -> tuple[list[Action], list[Action]]:
    """Set apart what has to wait for backward: what is brought back behind the last forward, and transfers after that.

    Nobody tells when the loss is done.
    """
    last = max((i for i, action in enumerate(actions) if action.kind in _RUNS), default=-1)
    waits = False
    forward, waiting = actions[: last + 1], []
    for action in actions[last + 1 :]:
        waits = waits or action.kind == "prefetch"
        (waiting if waits and action.kind in TRANSFERS else forward).append(action)
    return forward, waiting


def _split_first(actions: list[Action]) -> tuple[list[Action], list[Action]]:
    """Split what comes before the first backward where a stage runs for the second time."""
    seen: set[int] = set()
    for position, action in enumerate(actions):
        if action.kind == "recompute" or (action.kind == "forward" and action.stage in seen):
            return actions[:position], actions[position:]
        if action.kind == "forward":
            seen.add(action.stage)
    return actions, []


def _alive_after(alive: set[int], actions: Sequence[Action]) -> set[int]:
    now = set(alive)
    for action in actions:
        if action.kind == "forward":
            now.add(action.stage)
        elif action.kind == "free":
            now.discard(action.stage)
    return now


def _rerun(action: Action, boundaries: set[int]) -> Rerun:
    if action.kind == "recompute" and not action.option:
        return Rerun(action.stage, "until_saved", False)
    if action.option is None:
        return Rerun(action.stage, "drop", action.stage - 1 in boundaries)
    return Rerun(action.stage, "keep", False, action.option)


def _check(stages: Sequence[PlannedStage], dropped: set[int], holding: set[int]) -> None:
    for k in sorted(dropped):
        stage = stages[k]
        if stage.kind != "stage":
            raise UnsupportedPlan(f"plan: expected {stage.name!r} to be kept, got a rerun of it; solve again")
        if k not in holding and (k - 1) not in dropped:
            raise UnsupportedPlan(
                f"plan: expected the input of stage {stage.name!r} to be kept or its forerunner to be recomputed, "
                "got neither; solve again"
            )
