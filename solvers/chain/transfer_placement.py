"""Fits a schedule into a budget: which units are offloaded, and between which actions their copies begin and end.

Formulation: an offload unit may be absent between the action that made it and the one that uses it again. Absences are
chosen one at a time: at the peak that remains, of those that cover it, the one that leaves the link the longest time
(seconds of computation between making and using it), as far as host memory allows. The first n of this order are the
same for every budget and link. For a budget they are then given places: copies out begin as soon as an offload unit is
made; device bytes are given up as late as possible, oldest copy first, when the next action needs them; offload units
come back in the order in which they are used, each as soon as it fits with all that follows, and one that fits
throughout never leaves.

Guarantee: no action is above the budget, host memory fits; a schedule that fits already comes back unchanged. Stalls
are few, not fewest. Positions depend on bytes alone, so a faster link never makes a placed schedule slower.
Complexity: O(N (N + A)) for N absences and A actions, in numpy. Units: bytes and seconds.
Source: farthest use first is Belady, "A study of replacement algorithms for a virtual-storage computer" (1966); copies
in the order of use is the earliest due date rule, Jackson (1955).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from solvers.problem.chain import Chain
from solvers.problem.deadline import check_deadline
from solvers.problem.schedule import Action, Schedule
from solvers.problem.simulator import replay


class Absence(NamedTuple):
    """An offload unit that may be away after the action ``made`` until before the action ``used``."""

    stage: int
    unit: int
    size_bytes: int
    made: int
    used: int


class Placement:
    """One schedule without copies, and how to fit it into any budget.

    Args:
        chain, schedule: what to fit.
        host_bytes: of host memory; None without a limit.
        preferred: stage and number of offload units that are to leave before others.

    Attributes:
        seconds: the schedule's own, without any copy.
        peaks: ``peaks[n]`` is the peak with the first n absences; falling.

    >>> from solvers.problem.examples import equal_stages
    >>> kept = [Action("forward", k, 0) for k in range(3)]
    >>> back = [action for k in (2, 1, 0) for action in (Action("free", k), Action("backward", k))]
    >>> placement = Placement(equal_stages(3, (4,)), Schedule(actions=(*kept, *back)))
    >>> placement.absences_needed(13), placement.peaks
    (1, [16, 12])
    >>> [action.kind for action in placement.placed(13, 1).actions if action.option == 0][:6]
    ['forward', 'send', 'forward', 'release', 'forward', 'fetch']
    """

    def __init__(
        self,
        chain: Chain,
        schedule: Schedule,
        host_bytes: int | None = None,
        preferred: Collection[tuple[int, int]] = (),
    ) -> None:
        self._chain, self._schedule, self._host_bytes, self._preferred = chain, schedule, host_bytes, preferred
        replayed = replay(chain, schedule)
        timeline = replayed.timeline
        self.seconds = replayed.seconds
        after = [chain.resident_bytes, *(entry.after_bytes for entry in timeline[:-1])]
        self._needed_bytes = np.maximum([entry.peak_bytes for entry in timeline], after)
        self._remaining_bytes = self._needed_bytes.copy()
        self._starts = np.array([entry.begin_seconds for entry in timeline])
        self._candidates: list[Absence] | None = None
        self._chosen: list[Absence] = []
        self._host_bytes_used = np.zeros(len(timeline) + 1, dtype=np.int64)
        self.peaks = [replayed.peak_bytes]

    def absences_needed(self, budget_bytes: int) -> int | None:
        """The number of absences that the budget needs; None where no number suffices."""
        while self.peaks[-1] > budget_bytes:
            if not self._choose():
                return None
        return next(n for n, peak in enumerate(self.peaks) if peak <= budget_bytes)

    def smallest_peak(self) -> int:
        """The peak with as many absences as help."""
        while self._choose():
            pass
        return self.peaks[-1]

    def placed(self, budget_bytes: int, count: int) -> Schedule:
        """The schedule with at most the first ``count`` absences, which the budget must allow."""
        returns = self._returns(budget_bytes, self._chosen[:count])
        released = self._releases(budget_bytes, returns)
        return self._written(returns, released) if released else self._schedule

    def _choose(self) -> bool:
        """Choose one absence more; False where none covers the peak that remains."""
        if self._candidates is None:
            self._candidates = list(_absences(self._chain, self._schedule.actions))
            rows = [(a.made, a.used, a.size_bytes) for a in self._candidates]
            columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
            self._made, self._used = columns[:, 0], columns[:, 1]
            idle = self._starts[self._used] - self._starts[np.minimum(self._made + 1, len(self._starts) - 1)]
            self._rank = np.empty(len(self._candidates), dtype=np.int64)
            wanted = np.array([(a.stage, a.unit) in self._preferred for a in self._candidates], dtype=bool)
            self._rank[np.lexsort((-self._made, columns[:, 2], idle, wanted))] = np.arange(len(self._candidates))
        check_deadline()
        highest = int(self._remaining_bytes.argmax())
        while True:
            ranks = np.where((self._made < highest) & (highest < self._used), self._rank, -1)
            best = int(ranks.argmax()) if ranks.size else -1
            if best < 0 or ranks[best] < 0:
                return False
            self._rank[best] = -1
            if self._take(self._candidates[best]):
                return True

    def _take(self, absence: Absence) -> bool:
        """Count an absence as chosen, if host memory has room for it."""
        held = self._host_bytes_used[absence.made + 1 : absence.used + 1]
        if self._host_bytes is not None and held.max() + absence.size_bytes > self._host_bytes:
            return False
        held += absence.size_bytes
        self._remaining_bytes[absence.made + 1 : absence.used] -= absence.size_bytes
        self._chosen.append(absence)
        self.peaks.append(max(int(self._remaining_bytes.max()), self._chain.optimizer_peak_bytes))
        return True

    def _returns(self, budget_bytes: int, chosen: Sequence[Absence]) -> dict[Absence, int]:
        """Before which action each unit comes back, in the order of use; those that need not leave are left out."""
        room = budget_bytes - self._needed_bytes
        for absence in chosen:
            room[absence.made + 1 : absence.used] += absence.size_bytes
        returns: dict[Absence, int] = {}
        latest = 0
        for absence in sorted(chosen, key=lambda a: (a.used, -a.made, a.unit)):
            window = room[absence.made + 1 : absence.used]
            tight = np.flatnonzero(window < absence.size_bytes)
            if not tight.size:
                window -= absence.size_bytes
                continue
            latest = max(latest, absence.made + 2 + int(tight[-1]))
            room[latest : absence.used] -= absence.size_bytes
            returns[absence] = latest
        return returns

    def _releases(self, budget_bytes: int, returns: dict[Absence, int]) -> dict[Absence, int]:
        """Before which action each offload unit gives up its bytes; those that never have to are left out."""
        waiting = sorted(returns, key=lambda a: (a.made, -a.size_bytes, a.unit))
        changes = np.zeros(len(self._needed_bytes) + 1, dtype=np.int64)  # of what is in host memory alone
        released: dict[Absence, int] = {}
        away_bytes = 0
        for position, needed in enumerate(self._needed_bytes.tolist()):
            away_bytes -= int(changes[position])
            missing = needed - away_bytes - budget_bytes
            while missing > 0:
                index = next(i for i, a in enumerate(waiting) if a.made < position < returns[a])
                absence = waiting.pop(index)
                released[absence] = position
                changes[returns[absence]] += absence.size_bytes
                away_bytes += absence.size_bytes
                missing -= absence.size_bytes
        return released

    def _written(self, returns: dict[Absence, int], released: dict[Absence, int]) -> Schedule:
        begins = sorted(released, key=lambda a: (a.made, -a.size_bytes, a.unit))
        transfers = [(absence.made + 1, Action("send", absence.stage, absence.unit)) for absence in begins]
        transfers += [(position, Action("release", a.stage, a.unit)) for a, position in released.items()]
        transfers += [(position, Action("fetch", a.stage, a.unit)) for a, position in returns.items() if a in released]
        return self._schedule.with_inserted(transfers)


class _HeldUnits(NamedTuple):
    made: int
    offload_units: tuple[int, ...]
    dropped: bool  # dropped: the offload units are parts of its input


def _absences(chain: Chain, actions: Sequence[Action]) -> Iterator[Absence]:
    """Every offload unit that a stage holds between two of its actions, where anything else happens in between."""
    held: dict[int, _HeldUnits] = {}
    for position, action in enumerate(actions):
        k, stage = action.stage, chain.stages[action.stage]
        reader = held.get(k + 1)
        if reader is not None and reader.dropped and action.kind in ("free", "forward"):
            del held[k + 1]  # its input goes, or is made again
        if action.kind == "free":
            continue
        if k in held:
            made, units, _ = held.pop(k)
            yield from (Absence(k, i, size, made, position) for i, size in enumerate(units) if position > made + 1)
        if action.kind != "backward":
            holder = stage if action.option is None else stage.options[action.option]
            held[k] = _HeldUnits(position, holder.offload_units, dropped=action.option is None)
