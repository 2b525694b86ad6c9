"""Persistent schedules of a chain: the bytes that each choice of their recursion needs, and the actions it means.

A persistent schedule answers a range of stages ``s..t`` by one of three choices: ``keep`` (run s with an option,
answer s+1..t, backward of s), ``recompute`` (s == t: run s again directly before its backward), ``drop`` (run
s..q-1 keeping nothing but the boundary before q, answer q..t, then answer s..q-1 again). The first pass over the
whole chain is the range that ends at ``t == stage_count``, a stage without cost that stands for the loss.

Levels are bytes above the resident ones and above everything held for stages before s, with the residues of all
stages before s counted as if they were there. With this offset a stage that is dropped shifts nothing but its
boundary, and one that is kept shifts ``kept_bytes - residue_bytes``, in first passes and repeated ones alike.

The smallest budget of any of them:

Formulation: the persistent recursion of above with bytes in place of seconds; the need of a
range is the smallest, over its choices, of the largest need of the parts:
``need(s, t) = min(keep: max(own, need(s+1, t) + shift), drop: max(own, need(q, t) + a(q-1), need(s, q-1)))``.

Guarantee: exact in bytes among persistent schedules (what is kept stays kept until its backward). Where stages share
tensors the recursion is solved with these counted throughout and not at all, and the smaller replayed peak counts.
Complexity: O(L^3) for L stages, vectorised over q. Units: bytes.
Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019), section 4, on the smallest memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from solvers.arrays import Integers
from solvers.problem.chain import Chain, Link
from solvers.problem.deadline import check_deadline
from solvers.problem.schedule import TRANSFERS, Action, Schedule
from solvers.problem.simulator import replay
from solvers.problem.solution import Shortage


class PersistentChoice(NamedTuple):
    """One decision: ``keep`` or ``recompute`` with an option's index, or ``drop`` with the end of the dropped run."""

    kind: Literal["keep", "recompute", "drop"]
    value: int


class ChainBytes:
    """Needs and shifts of every choice, in exact bytes, consistent with the simulator action by action.

    Attributes:
        stage_count: stages of the chain; also the end index of the first pass.
        run_end: for each s the largest q such that s..q-1 may be dropped together.
        rerun_needs: for each s what dropping s..q-1 once more adds to the entry, for q = s + 1, s + 2, ...
        entries: for each stage the level that ranges which end with it start at.
        boundaries: bytes of the boundary before each stage, and after the last: by how much dropping all stages
            before it shifts the rest.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.stages = chain.stages
        self.stage_count = len(chain.stages)
        self.residues_before = [0, *accumulate(s.residue_bytes for s in self.stages)]
        done = list(accumulate(s.parameter_gradient_bytes for s in self.stages))
        self._gradients = [done[-1] - d + s.gradient_bytes for d, s in zip(done, self.stages, strict=True)]
        self._gradients.append(done[-1])  # index -1: every stage has gone backward
        self.entries = np.array([self.entry(end + 1, end) for end in range(self.stage_count)], dtype=np.int64)
        self.boundaries = np.array([0, *(s.boundary_bytes for s in self.stages)], dtype=np.int64)
        self.run_end = self._run_ends()
        first = self._first_steps()
        rerun = np.array([max(s.forward_peak_bytes, s.boundary_bytes) for s in self.stages], dtype=np.int64)
        self._first_needs = [self._drop_needs(s, first) for s in range(self.stage_count)]
        self.rerun_needs = [self._drop_needs(s, rerun) for s in range(self.stage_count)]

    def entry(self, start: int, end: int) -> int:
        """Level that the range needs before anything of it runs."""
        stop = min(end, self.stage_count - 1) + 1  # the stage at which nothing of it is left to run
        if end == self.stage_count and start < stop:
            return self.residues_before[start]
        return self.residues_before[stop] + self._gradients[stop - 1]

    def keep(self, start: int, end: int, o: int) -> tuple[int, int]:
        """Level that keeping ``start`` needs, and by how much it shifts the rest of the range."""
        stage, option = self.stages[start], self.stages[start].options[o]
        need = max(self.entry(start, end) + option.forward_peak_bytes, self.backward(start, o))
        return need, option.kept_bytes - stage.residue_bytes + stage.boundary_bytes

    def recompute(self, start: int, o: int) -> int:
        """Level that running ``start`` again directly before its backward needs."""
        option = self.stages[start].options[o]
        run = self.residues_before[start] + self._gradients[start] + option.recompute_peak_bytes
        return max(self.entry(start, start), run, self.backward(start, o))

    def drop(self, start: int, end: int) -> Integers:
        """Level that dropping ``start..q-1`` needs, for q = start + 1, start + 2, ..."""
        if end == self.stage_count:
            return self._first_needs[start]
        return self.rerun_needs[start][: end - start] + self.entry(start, end)

    def backward(self, s: int, o: int) -> int:
        """Level that the backward of a stage kept with an option needs."""
        option, base = self.stages[s].options[o], self.residues_before[s]
        held = option.kept_bytes + option.kept_output_bytes
        return base + max(self._gradients[s] + held + option.backward_peak_bytes, self._gradients[s - 1])

    def _run_ends(self) -> list[int]:
        ends = [0] * self.stage_count
        for s in reversed(range(self.stage_count)):
            follows = s + 1 < self.stage_count and self.stages[s + 1].linked and self.stages[s + 1].recomputable
            ends[s] = s if not self.stages[s].recomputable else ends[s + 1] if follows else s + 1
        return ends

    def _first_steps(self) -> Integers:
        """Per stage what its first run without keeping needs in addition to the boundary before it."""
        after = [stage.boundary_bytes + stage.residue_bytes for stage in self.stages]
        after[-1] += self.stages[-1].gradient_bytes  # the loss has run: its gradient is there
        peaks = [max(stage.forward_peak_bytes, left) for stage, left in zip(self.stages, after, strict=True)]
        return np.add(self.residues_before[:-1], peaks, dtype=np.int64)

    def _drop_needs(self, start: int, steps: Integers) -> Integers:
        check_deadline()
        dropped = slice(start, self.run_end[start])
        needs = steps[dropped] + self.boundaries[dropped]
        needs[:1] -= self.boundaries[start]  # the boundary before the range is counted elsewhere
        return np.maximum.accumulate(needs)


def persistent_schedule(
    stage_count: int, choose: Callable[[int, int, int], tuple[PersistentChoice, int, int]], token: int = 0
) -> Schedule:
    """Write out the actions of a persistent schedule.

    ``choose`` gives the choice for a range ``start, end`` and a solver's own token for it, with the tokens for what
    remains (the shifted range, then the range that is run again); ``token`` is that of the whole chain.
    """
    actions: list[Action] = []
    remaining: list[tuple[int, int, int] | Action] = [(0, stage_count, token)]
    while remaining:  # a stack rather than recursion: chains may be longer than Python's recursion limit
        check_deadline()
        item = remaining.pop()
        if isinstance(item, Action):
            actions.append(item)
        elif item[0] <= min(item[1], stage_count - 1):
            start, end, state = item
            choice, rest, again = choose(start, end, state)
            remaining.extend(reversed(_steps(start, end, choice, rest, again)))
    return Schedule(actions=tuple(actions))


def _steps(
    start: int, end: int, choice: PersistentChoice, rest: int, again: int
) -> list[tuple[int, int, int] | Action]:
    if choice.kind == "recompute":
        return [Action("recompute", start, choice.value), Action("backward", start)]
    if choice.kind == "keep":
        run = Action("forward", start, choice.value)
        return [run, (start + 1, end, rest), Action("free", start), Action("backward", start)]
    q = choice.value
    steps: list[tuple[int, int, int] | Action] = [Action("forward", start)]
    for k in range(start + 1, q):
        steps += [Action("forward", k), Action("free", k - 1)]
    return [*steps, (q, end, rest), Action("free", q - 1), (start, q - 1, again)]


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
    """The peak of one schedule and its place, the optimizer included."""
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
        """The needs of keeping the first stage, and of recomputing a single one, with each option."""
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
