"""When copies begin and end: as long before and after what needs them as the budget leaves room.

Where a schedule lets go of a storage between two of its uses and brings it back, that is an absence. Absences for which
there is room on the device after all are none, the shortest first. Of the others each waits to let go until its copy to
the host is done, and is fetched so early that it is back when it is used, as far as there is room: the sends in the
order of their begin, the fetches from the last to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from planner.steps.copy_clock import StepSeconds
from profiler.step_graph import StepGraph
from profiler.step_replay import CopyKind, StepCopy, StepRuns
from solvers.problem.link import Link


@dataclass(slots=True, kw_only=True)
class StepAbsence:
    """Turns in which a storage is not on the device. Turns count the runs of forward, the loss, those of backward.

    Attributes:
        storage: which.
        used: the turn of its last use before.
        first: the first turn without it.
        fetched: the turn at whose begin it takes its bytes again.
        needed: the turn of its next use.
    """

    storage: int
    used: int
    first: int
    fetched: int
    needed: int


def absences_between_uses(step: StepGraph, runs: StepRuns, fetches: Mapping[int, Sequence[int]]) -> list[StepAbsence]:
    """The longest absences: from the turn after one use to the next.

    Args:
        step: what its ops read and make.
        runs: what runs when.
        fetches: by storage the turns before which a schedule brings it back; without an effect where nothing uses it
            from then on.
    """
    uses: dict[int, list[int]] = {storage: [] for storage in fetches}
    for turn, ordinal in enumerate((*runs.forward, None, *runs.backward)):
        op = None if ordinal is None else step.ops[ordinal]
        for storage in () if op is None else {*op.reads, *op.makes} & uses.keys():
            uses[storage].append(turn)
    return [
        StepAbsence(storage=storage, used=used, first=used + 1, fetched=needed, needed=needed)
        for storage, turns in uses.items()
        for used, needed in pairwise(turns)
        if needed > used + 1 and any(used < turn <= needed for turn in fetches[storage])
    ]


class CopyPlacement:
    """Places copies in the room that a budget leaves.

    Args:
        step, runs: what runs when.
        seconds: that computation takes.
        link: over which copies go.

    Attributes:
        absences: to place.
    """

    def __init__(
        self, step: StepGraph, runs: StepRuns, absences: Iterable[StepAbsence], seconds: StepSeconds, link: Link
    ) -> None:
        self.absences = list(absences)
        self._step, self._runs, self._link = step, runs, link
        self._loss = len(runs.forward)
        of_turns = (
            (seconds.of_op[k] for k in runs.forward),
            (seconds.between,),
            (seconds.of_op[k] for k in runs.backward),
        )
        self._begins = [0.0, *accumulate(each for part in of_turns for each in part)]  # of each turn, in seconds

    def place(self, room_bytes: Sequence[int]) -> None:
        """Shorten absences, or leave them out.

        Args:
            room_bytes: of each turn, what the budget leaves above the bytes of ``copies`` as they are.
        """
        room = list(room_bytes)
        for absence in sorted(self.absences, key=lambda each: self._begins[each.needed] - self._begins[each.first]):
            size_bytes = self._size_bytes(absence)
            if all(room[turn] >= size_bytes for turn in range(absence.first, absence.fetched)):
                self._keep(absence, range(absence.first, absence.fetched), room)
                self.absences.remove(absence)
        self._place_releases(room)
        self._place_fetches(room)
        self.absences = [each for each in self.absences if each.first < each.fetched]

    def _place_releases(self, room: list[int]) -> None:
        free_seconds = 0.0
        for storage, made in self._sent():
            absence = self._first_of(storage)
            copy_seconds = self._link.to_host_seconds(self._size_bytes(absence))
            free_seconds = max(free_seconds, self._begins[made + 1]) + copy_seconds
            while (
                absence.first < absence.fetched
                and self._begins[absence.first] < free_seconds
                and room[absence.first] >= self._size_bytes(absence)
            ):
                self._keep(absence, [absence.first], room)
                absence.first += 1

    def _place_fetches(self, room: list[int]) -> None:
        begin = self._begins[-1]
        for absence in sorted(self.absences, key=lambda each: -each.needed):
            earliest = max(absence.first, self._loss + 1 if absence.needed > self._loss else 0)
            copy_seconds = self._link.to_device_seconds(self._size_bytes(absence))
            begin = min(begin, self._begins[absence.needed]) - copy_seconds
            while (
                absence.fetched > earliest
                and self._begins[absence.fetched] > begin
                and room[absence.fetched - 1] >= self._size_bytes(absence)
            ):
                absence.fetched -= 1
                self._keep(absence, [absence.fetched], room)

    def copies(self) -> tuple[StepCopy, ...]:
        """The copies of all absences, in their order."""
        placed = [(made + 1, 0, made, self._copy("send", storage, made + 1)) for storage, made in self._sent()]
        for absence in self.absences:
            if absence is self._first_of(absence.storage):
                release = self._copy("release", absence.storage, absence.first)
                placed.append((absence.first, 1, absence.used, release))
            fetch = self._copy("fetch", absence.storage, absence.fetched)
            placed.append((absence.fetched, 2, absence.needed, fetch))
        return tuple(copy for *_, copy in sorted(placed, key=lambda each: each[:3]))

    def _copy(self, kind: CopyKind, storage: int, turn: int) -> StepCopy:
        """A copy at the begin of a turn; at that of the loss it comes last in forward."""
        if turn <= self._loss:
            return StepCopy(kind=kind, storage=storage, side="forward", before=turn)
        return StepCopy(kind=kind, storage=storage, side="backward", before=turn - self._loss - 1)

    def _sent(self) -> Iterator[tuple[int, int]]:
        """Storages that are ever away, each with the turn that makes it, in that order."""
        away = {absence.storage for absence in self.absences}
        for turn, ordinal in enumerate(self._runs.forward):
            for storage in self._step.ops[ordinal].makes:
                if storage in away:
                    yield storage, turn

    def _first_of(self, storage: int) -> StepAbsence:
        return min((each for each in self.absences if each.storage == storage), key=lambda each: each.first)

    def _keep(self, absence: StepAbsence, turns: Iterable[int], room: list[int]) -> None:
        for turn in turns:
            room[turn] -= self._size_bytes(absence)

    def _size_bytes(self, absence: StepAbsence) -> int:
        return self._step.storages[absence.storage].size_bytes
