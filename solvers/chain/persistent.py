"""Persistent schedules of a chain: the bytes that each choice of their recursion needs, and the actions it means.

A persistent schedule answers a range of stages ``s..t`` by one of three choices: ``keep`` (run s with an option,
answer s+1..t, backward of s), ``recompute`` (s == t: run s again directly before its backward), ``drop`` (run
s..q-1 keeping nothing but the boundary before q, answer q..t, then answer s..q-1 again). The first pass over the
whole chain is the range that ends at ``t == stage_count``, a stage without cost that stands for the loss.

Levels are bytes above the resident ones and above everything held for stages before s, with the residues of all
stages before s counted as if they were there. With this offset a stage that is dropped shifts nothing but its
boundary, and one that is kept shifts ``kept_bytes - residue_bytes``, in first passes and repeated ones alike.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from solvers.arrays import Integers
from solvers.problem.chain import Chain
from solvers.problem.deadline import check_deadline
from solvers.problem.schedule import Action, Schedule


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
