"""Schedules of chains and of graphs: the ordered actions that a solver returns and that a planned model carries out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from solvers.problem.plain_data import is_whole

ActionKind = Literal["forward", "recompute", "backward", "run", "free", "send", "release", "fetch"]
RUNS: tuple[ActionKind, ...] = ("forward", "recompute")
TRANSFERS: tuple[ActionKind, ...] = ("send", "release", "fetch")
_OLDER_WORDS: dict[Any, ActionKind] = {"offload": "send", "prefetch": "fetch"}  # in files


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a schedule; ``stage`` is the position of a chain's stage, or of a graph's node.

    In a graph ``run`` runs the node and ``free`` drops its output.

    In a chain ``forward`` with ``option`` None runs the stage and keeps only the boundary
    after it; with an option it also keeps what the option keeps. ``recompute``
    runs the stage again directly before its backward and makes no boundary.
    ``backward`` consumes what was kept. ``free`` drops the boundary after the stage.

    Three actions are about one offload unit of what the stage holds between forward and backward: number ``option`` of
    ``Option.offload_units`` where the stage is kept, of ``Stage.offload_units`` where it was dropped and holds its
    input. ``send`` begins to copy it to host memory; ``release`` waits for that copy, then its bytes are free on the
    device; ``fetch`` takes them again and begins to copy it back. The stage's next run or backward waits for that.
    """

    kind: ActionKind
    stage: int
    option: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions in order; one whole forward and backward of a chain, or one whole run of a graph."""

    actions: tuple[Action, ...]

    def forward_runs(self) -> int:
        """The number of forwards of a chain's stages, first runs included."""
        return sum(a.kind in RUNS for a in self.actions)

    def choices_inside(self) -> int:
        """The number of forwards that keep a part of what they save, so that ops inside the stage are recomputed."""
        return sum(bool(a.option) for a in self.actions if a.kind in RUNS)

    def with_inserted(self, actions: Iterable[tuple[int, Action]]) -> Schedule:
        """The schedule with actions more, each before the action that has a position now, in the order given."""
        before: list[list[Action]] = [[] for _ in self.actions]
        for position, action in actions:
            before[position].append(action)
        parts = zip(before, self.actions, strict=True)
        return Schedule(actions=tuple(action for more, present in parts for action in (*more, present)))

    def nodes_run(self) -> list[int]:
        """The nodes of a graph that run, in order, repeated runs included."""
        return [action.stage for action in self.actions if action.kind == "run"]

    def to_list(self) -> list[list[Any]]:
        """Plain data of a chain's schedule: one ``[kind, stage, option]`` per action."""
        return [[a.kind, a.stage, a.option] for a in self.actions]

    @classmethod
    def from_list(cls, rows: Sequence[Sequence[Any]]) -> Schedule:
        """Read what ``to_list`` wrote; raises ValueError on anything else."""
        return cls(actions=tuple(_action(row) for row in rows))


def _action(row: Sequence[Any]) -> Action:
    if not isinstance(row, (list, tuple)) or len(row) != 3:
        raise ValueError(f"a schedule's action: expected [kind, stage, option], got {row!r}; save the plan again")
    kind, stage, option = row
    kind = _OLDER_WORDS.get(kind, kind) if isinstance(kind, str) else kind
    kinds = (*RUNS, "backward", "free", *TRANSFERS)
    if kind not in kinds or not is_whole(stage) or not (option is None or is_whole(option)):
        raise ValueError(
            f"a schedule's action: expected one of {kinds} with whole numbers, got {row!r}; save the plan again"
        )
    return Action(cast(ActionKind, kind), stage, option)
