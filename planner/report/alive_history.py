"""What is alive at every moment of a step, by op and module: each thing named once, and per moment what changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.explain.peak import Peak, PeakPart
from profiler.op_graph import kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveHistory:
    """The things alive in each action of a step.

    Attributes:
        labels: of each thing what it is there for, the op that made it, and the module that called that.
        changes: per action the things whose bytes differ from those in the action before: position of the label, and
            bytes, 0 for what is gone.
    """

    labels: tuple[tuple[str, str, str], ...]
    changes: tuple[tuple[tuple[int, int], ...], ...]

    def at(self, action: int) -> dict[tuple[str, str, str], int]:
        """Bytes alive in an action, by label."""
        sizes: dict[int, int] = {}
        for changes in self.changes[: action + 1]:
            sizes.update(changes)
        return {self.labels[number]: size for number, size in sizes.items() if size}


def history_of(moments: Iterable[Peak]) -> AliveHistory:
    """The history of a step whose actions are explained one by one."""
    numbers: dict[tuple[str, str, str], int] = {}
    before: dict[int, int] = {}
    changes = []
    for moment in moments:
        now: dict[int, int] = {}
        for part in moment.parts:
            number = numbers.setdefault(_label(part), len(numbers))
            now[number] = now.get(number, 0) + part.size_bytes
        names = dict.fromkeys([*before, *now])
        changed = [(k, now.get(k, 0)) for k in names if now.get(k, 0) != before.get(k, 0)]
        changes.append(tuple(changed))
        before = now
    return AliveHistory(labels=tuple(numbers), changes=tuple(changes))


def _label(part: PeakPart) -> tuple[str, str, str]:
    module = ".".join(name for name in (part.stage, part.module) if name)
    kind = kind_of(part.op)
    return part.what, kind, "" if module == kind else module  # An op outside of all modules stands for its own.
