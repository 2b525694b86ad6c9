"""The smallest budget with which a chain can be trained, its schedule, and the stage and phase that force it.

Formulation: the persistent recursion of ``solvers.chain.persistent`` with bytes in place of seconds; the need of a
range is the smallest, over its choices, of the largest need of the parts:
``need(s, t) = min(keep: max(own, need(s+1, t) + shift), drop: max(own, need(q, t) + a(q-1), need(s, q-1)))``.

Guarantee: exact in bytes among persistent schedules (what is kept stays kept until its backward). Where stages share
tensors the recursion is solved with these counted throughout and not at all, and the smaller replayed peak counts.
Complexity: O(L^3) for L stages, vectorised over q. Units: bytes.
Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019), section 4, on the smallest memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solvers.arrays import Integers
from solvers.chain.persistent import ChainBytes, PersistentChoice, persistent_schedule
from solvers.problem.chain import Chain, Link
from solvers.problem.deadline import check_deadline
from solvers.problem.schedule import TRANSFERS, Schedule
from solvers.problem.simulator import replay
from solvers.problem.solution import Shortage

_NEVER = np.iinfo(np.int64).max // 4  # sums of two still fit


def smallest_schedule(chain: Chain) -> Schedule:
    """The schedule with the smallest peak of forward and backward.

    >>> from solvers.problem.examples import equal_stages
    >>> replay(equal_stages(3), smallest_schedule(equal_stages(3))).peak_bytes
    6
    """
    variants = dict.fromkeys((chain.folded(), replace(chain, shared=())))  # shared tensors: throughout, or not at all
    schedules = [persistent_schedule(len(chain.stages), _Needs(ChainBytes(variant)).choose) for variant in variants]
    return min(schedules, key=lambda schedule: replay(chain, schedule).peak_bytes)


def smallest_level(sizes: ChainBytes) -> int:
    """Bytes above the resident ones that the smallest persistent schedule needs."""
    return int(_Needs(sizes).first[0])


def shortage(chain: Chain) -> Shortage:
    """The smallest budget of any persistent schedule, and the stage and moment at which it is needed."""
    return shortage_of(chain, smallest_schedule(chain))


def shortage_of(chain: Chain, schedule: Schedule, link: Link | None = None) -> Shortage:
    """What the peak of one schedule is and where it stands, the optimizer included."""
    result = replay(chain, schedule, link)
    highest = result.peak_moment
    if chain.optimizer_peak_bytes > highest.peak_bytes:
        return Shortage(minimum_budget_bytes=chain.optimizer_peak_bytes, stage="", moment="optimizer")
    moment = "backward" if highest.action.kind in ("free", *TRANSFERS) else highest.action.kind
    stage = chain.stages[highest.action.stage].name
    return Shortage(minimum_budget_bytes=result.peak_bytes, stage=stage, moment=moment)


class _Needs:
    """Smallest level of every range (``first``: of those of the first pass), ``_NEVER`` where it cannot be run again.

    Ranges that run again are filled by rising length, all of one length at once; those of the first pass by start.
    """

    def __init__(self, sizes: ChainBytes) -> None:
        self.bytes = sizes
        count = sizes.stage_count
        square = (count, count)
        self._again = np.full(square, _NEVER, dtype=np.int64)  # row: first stage; column: length less one
        self._rests = np.full(square, _NEVER, dtype=np.int64)  # as a drop before sees it; row: last stage
        self._drop_needs = np.full(square, _NEVER, dtype=np.int64)
        for start, needs in enumerate(sizes.rerun_needs):
            check_deadline()
            self._drop_needs[start, : needs.size] = needs
        self._reach = np.array(sizes.run_end) - np.arange(count)
        self._entries, self._boundaries = sizes.entries, sizes.boundaries
        self._keeps = self._keep_rows()
        for length in range(int(self._reach.max())):
            self._fill(length)
        self.first = np.full(count + 1, _NEVER, dtype=np.int64)
        self.first[count] = sizes.entry(count, count)
        for start in reversed(range(count)):
            self.first[start] = max(self._best(start, count)[0], sizes.entry(start, count))

    def choose(self, start: int, end: int, token: int) -> tuple[PersistentChoice, int, int]:
        return self._best(start, end)[1], token, token

    def _fill(self, length: int) -> None:
        check_deadline()
        rows = self._entries.size - length
        entries = self._entries[length:]
        best = self._kept(length) if length else self._single()
        if length:
            drops = self._drop_needs[:rows, :length] + entries[:, None]
            np.maximum(drops, self._again[:rows, :length], out=drops)
            np.maximum(drops, self._rests[length:, length - 1 :: -1], out=drops)
            best = np.minimum(best, drops.min(axis=1))
        best = np.where(self._reach[:rows] > length, np.maximum(best, entries), _NEVER)
        self._again[:rows, length] = best
        self._rests[length:, length] = best + self._boundaries[:rows]

    def _kept(self, length: int) -> Integers:
        """Smallest level with which each range of a length keeps its first stage."""
        rows = self._entries.size - length
        shifts, backward_needs, peaks = self._keeps[:, :, :rows]
        needs = np.maximum(self._entries[length:] + peaks, backward_needs)
        return np.maximum(needs, self._again[1 : rows + 1, length - 1] + shifts).min(axis=0)

    def _keep_rows(self) -> Integers:
        """Shift, level of the backward and forward peak of every option; stages with fewer repeat theirs."""
        sizes = self.bytes
        rows = [
            [(sizes.keep(s, s, o)[1], sizes.backward(s, o), x.forward_peak_bytes) for o, x in enumerate(stage.options)]
            for s, stage in enumerate(sizes.stages)
        ]
        most = max(len(row) for row in rows)
        repeated = [[row[o % len(row)] for o in range(most)] for row in rows]
        return np.array(repeated, dtype=np.int64).transpose(2, 1, 0).copy()

    def _single(self) -> Integers:
        needs = [min(need for need, _ in self._candidates(s, s)) for s in range(self._entries.size)]
        return np.array(needs, dtype=np.int64)

    def _best(self, start: int, end: int) -> tuple[int, PersistentChoice]:
        check_deadline()
        choices = self._candidates(start, end)
        drops = self._drops(start, end)
        if drops.size:
            best = int(drops.argmin())
            choices.append((int(drops[best]), PersistentChoice("drop", start + 1 + best)))
        return min(choices, key=lambda pair: pair[0])

    def _candidates(self, start: int, end: int) -> list[tuple[int, PersistentChoice]]:
        """What keeping the first stage needs, and running a single one again, with each option."""
        sizes, choices = self.bytes, []
        rest = self._rest(start + 1, end)
        for option in range(len(sizes.stages[start].options)):
            need, shift = sizes.keep(start, end, option)
            choices.append((max(need, rest + shift), PersistentChoice("keep", option)))
            if start == end:
                choices.append((sizes.recompute(start, option), PersistentChoice("recompute", option)))
        return choices

    def _rest(self, start: int, end: int) -> int:
        if end == self.bytes.stage_count:
            return int(self.first[start])
        return int(self._again[start, end - start]) if start <= end else int(self._entries[end])

    def _drops(self, start: int, end: int) -> Integers:
        needs = self.bytes.drop(start, end)
        last = start + needs.size
        if end == self.bytes.stage_count:
            rest = self.first[start + 1 : last + 1] + self._boundaries[start + 1 : last + 1]
        else:
            rest = self._rests[end, end - last : end - start][::-1]
        return np.maximum(np.maximum(needs, rest), self._again[start, : needs.size])
