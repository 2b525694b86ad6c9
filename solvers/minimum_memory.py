"""The smallest budget with which a chain can be trained at all, its schedule, and what forces it.

Formulation: the persistent recursion of ``solvers.persistent`` with bytes in place of seconds; the need of a range
is the smallest, over its choices, of the largest need of the parts:
``need(s, t) = min(keep: max(own, need(s+1, t) + shift), drop: max(own, need(q, t) + a(q-1), need(s, q-1)))``.

Guarantee: exact in bytes among persistent schedules (what is kept stays kept until its backward). Where stages share
tensors the recursion is solved with these counted throughout and not at all, and the smaller replayed peak counts.
Complexity: O(L^3) for L stages, vectorised over q. Units: bytes.
Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019), section 4, on the smallest memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solvers.chain import Chain
from solvers.persistent import Bytes, ChainBytes, Choice, persistent_schedule
from solvers.problem import Shortage
from solvers.schedule import Schedule
from solvers.simulator import replay

_NEVER = np.iinfo(np.int64).max // 4  # sums of two still fit


def smallest_schedule(chain: Chain) -> Schedule:
    """The schedule with the smallest peak of forward and backward.

    >>> from solvers.chain import Option, Stage
    >>> way = Option(forward_seconds=1, backward_seconds=2, kept_bytes=4, forward_peak_bytes=6,
    ...              backward_peak_bytes=1, recompute_seconds=1, recompute_peak_bytes=4)
    >>> stage = Stage(name="s", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    >>> replay(Chain(stages=(stage,) * 3), smallest_schedule(Chain(stages=(stage,) * 3))).peak_bytes
    6
    """
    variants = dict.fromkeys((chain.folded(), replace(chain, shared=())))  # shared tensors: throughout, or not at all
    found = [_smallest(variant) for variant in variants]
    return min(found, key=lambda schedule: replay(chain, schedule).peak_bytes)


def _smallest(chain: Chain) -> Schedule:
    return persistent_schedule(len(chain.stages), _Needs(ChainBytes(chain)).choose)


def shortage(chain: Chain) -> Shortage:
    """The smallest budget of any persistent schedule, and the stage and moment at which it is needed."""
    return shortage_of(chain, smallest_schedule(chain))


def shortage_of(chain: Chain, schedule: Schedule) -> Shortage:
    """What the peak of one schedule is and where it stands, the optimizer included."""
    result = replay(chain, schedule)
    worst = result.peak_moment
    if chain.other_peak_bytes > worst.peak_bytes:
        return Shortage(minimum_budget_bytes=chain.other_peak_bytes, stage="", moment="optimizer")
    moment = "backward" if worst.action.kind == "free" else worst.action.kind
    return Shortage(minimum_budget_bytes=result.peak_bytes, stage=chain.stages[worst.action.stage].name, moment=moment)


class _Needs:
    """Smallest level of every range; ranges that cannot be run again stay at ``_NEVER``."""

    def __init__(self, chain_bytes: ChainBytes) -> None:
        self.bytes = chain_bytes
        count = chain_bytes.stage_count
        self.levels = np.full((count + 1, count + 1), _NEVER, dtype=np.int64)
        self.choices: dict[tuple[int, int], Choice] = {}
        for end in range(count + 1):
            self._fill(end)

    def choose(self, start: int, end: int, token: int) -> tuple[Choice, int, int]:
        return self.choices[start, end], token, token

    def _fill(self, end: int) -> None:
        b, stop = self.bytes, self.bytes.empty_stage(end)
        self.levels[stop, end] = b.entry(stop, end)
        for start in reversed(range(stop)):
            if end < b.stage_count and b.run_end[start] <= end:
                return
            best = min(self._candidates(start, end), key=lambda pair: pair[0])
            self.levels[start, end] = max(best[0], b.entry(start, end))
            self.choices[start, end] = best[1]

    def _candidates(self, start: int, end: int) -> list[tuple[int, Choice]]:
        b, found = self.bytes, []
        for option in range(len(b.stages[start].options)):
            need, shift = b.keep(start, end, option)
            found.append((max(need, int(self.levels[start + 1, end]) + shift), Choice("keep", option)))
            if start == end:
                found.append((b.recompute(start, option), Choice("recompute", option)))
        drops = self._drops(start, end)
        if drops.size:
            best = int(drops.argmin())
            found.append((int(drops[best]), Choice("drop", start + 1 + best)))
        return found

    def _drops(self, start: int, end: int) -> Bytes:
        b = self.bytes
        own = b.drop(start, end)
        last = start + own.size
        shifts = np.array([b.boundary(k) for k in range(start, last)], dtype=np.int64)
        rest = self.levels[start + 1 : last + 1, end] + shifts
        return np.maximum(np.maximum(own, rest), self.levels[start, start:last])
