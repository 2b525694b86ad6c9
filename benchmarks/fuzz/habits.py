"""All habits of training loops, by name."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.fuzz.backward_habits import BACKWARDS, CONTEXTS
from benchmarks.fuzz.forward_habits import FORWARDS
from benchmarks.fuzz.habit import Habit
from benchmarks.fuzz.model_habits import CHANGES, CHANGING, KEPT_ON_PARAMETERS, UPDATES
from benchmarks.fuzz.state_habits import FLAGS, TENSORS

HABITS: dict[str, Habit] = {
    habit.name: habit
    for habit in (
        *FLAGS,
        *TENSORS,
        *FORWARDS,
        *CONTEXTS,
        *BACKWARDS,
        *CHANGES,
        *CHANGING,
        *KEPT_ON_PARAMETERS,
        *UPDATES,
    )
}


def go_together(names: Sequence[str]) -> bool:
    """Whether no two of these habits replace the same part of the loop."""
    chosen = [HABITS[name] for name in names]
    return all(sum(bool(getattr(h, place)) for h in chosen) <= 1 for place in ("forward", "backward", "update"))
