"""Ranges of stages that run again: the persistent recursion for all of them, by rising length, as whole arrays.

A row stands for a range that starts at a post. With one post per stage these are all ranges up to a longest one;
with posts further apart they are long ranges between posts, which only know how to drop up to another post and take
their shortest ranges from the posts that lie closer together.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from solvers.chain.persistent import Bytes, ChainBytes, PersistentChoice
from solvers.chain.rotor_grid import (
    NEVER,
    NOTHING,
    Answers,
    Grid,
    Index,
    Menu,
    Seconds,
    faster,
    keep_menus,
    reached_slots,
    recompute_menus,
    settled,
)


class Facts(NamedTuple):
    """What a table knows about its chain, beside its bytes, grid and costs.

    Attributes:
        runs: for each stage the cost of running all stages before it, keeping nothing.
        entries: for each stage the level that ranges which end with it start at.
        drop_needs: what dropping stages once more adds to the entry, for all starts one after the other.
        drop_offsets: where in ``drop_needs`` each start begins.
    """

    bytes: ChainBytes
    grid: Grid
    seconds: Seconds
    keeps: list[Menu]
    recomputes: list[Menu]
    runs: Bytes
    entries: Bytes
    drop_needs: Bytes
    drop_offsets: Index

    @property
    def options(self) -> int:
        """Codes for each of keeping and recomputing; dropping has those from twice as many on."""
        return max(len(self.keeps), len(self.recomputes))


def gather_facts(chain_bytes: ChainBytes, grid: Grid, seconds: Seconds) -> Facts:
    """Collect the arrays that all ranges share."""
    runs = [0, *accumulate(seconds.cost(stage.forward_seconds) for stage in chain_bytes.stages)]
    entries = [chain_bytes.entry(end + 1, end) for end in range(chain_bytes.stage_count)]
    drops = chain_bytes.again_needs
    return Facts(
        bytes=chain_bytes,
        grid=grid,
        seconds=seconds,
        keeps=keep_menus(chain_bytes, seconds),
        recomputes=recompute_menus(chain_bytes, seconds),
        runs=np.array(runs, dtype=np.int64),
        entries=np.array(entries, dtype=np.int64),
        drop_needs=np.concatenate([*drops, [NOTHING]]),
        drop_offsets=np.cumsum([0, *(needs.size for needs in drops)])[:-1],
    )


def code_count(chain_bytes: ChainBytes) -> int:
    """Codes that a cost may carry: an option to keep, an option to recompute, or a post to drop up to."""
    return 2 * max(len(stage.options) for stage in chain_bytes.stages) + chain_bytes.stage_count + 1


class _Span(NamedTuple):
    """Slots of all ranges of a length: before ``least`` none has an answer, from ``most`` on none gets faster."""

    least: int
    most: int


class Ranges:
    """Answers of all ranges between posts, up to ``longest`` posts apart.

    Attributes:
        posts: first stages of ranges, rising, and the stage after the last one.
        answers: for each length (in posts, less one) the answers of all ranges, a row per first post.
    """

    def __init__(self, known: Facts, posts: list[int], longest: int, finer: Ranges | None = None) -> None:
        self.known, self.posts, self.finer = known, posts, finer
        self.answers: list[Answers] = []
        self._starts = np.array(posts[:-1])
        self._ends = np.array(posts[1:]) - 1
        self._row_of = {post: row for row, post in enumerate(posts)}
        self._reach = self._reaches()
        self._boundaries = np.array([known.bytes.boundary(post - 1) if post else 0 for post in posts[:-1]])
        self._below = known.grid.slots_below(self._boundaries)
        self._options = known.options
        self._keep_below = [known.grid.slots_below(menu.shifts) for menu in known.keeps] if finer is None else []
        self._rests: list[Bytes] = []  # costs as the drop before a range sees them: shifted, with its runs and code
        self._extremes: list[tuple[Bytes, Bytes]] = []  # per row the needs of the slowest and of the fastest answer
        self._spans: list[_Span] = []
        self._rest_spans: list[_Span] = []
        lengths = min(longest, int(self._reach.max(initial=0)))
        sizes = (self._starts.size - np.arange(lengths)) * known.grid.size
        self._offsets = np.concatenate(([0], np.cumsum(sizes)))
        self._all_needs = np.empty(self._offsets[-1], dtype=np.int64)  # in one piece: choices look into many lengths
        for length in range(lengths):
            self._fill(length)

    def knows(self, start: int, end: int) -> bool:
        """Whether the range is one of these."""
        row, stop = self._row_of.get(start), self._row_of.get(end + 1)
        return row is not None and stop is not None and 0 <= stop - row - 1 < len(self.answers)

    def look(self, start: int, end: int, level: int) -> tuple[PersistentChoice, int]:
        """The choice that the fastest answer of a range within a level makes, and its exact need."""
        row = self._row_of[start]
        answers = self.answers[self._row_of[end + 1] - row - 1]
        slot = int(np.searchsorted(answers.needs[row], level, side="right")) - 1
        return self._choice(start, int(answers.codes[row, slot])), int(answers.needs[row, slot])

    def answers_from(self, start: int) -> tuple[Index, Bytes, Bytes]:
        """Where the ranges from a stage stop, their costs and needs; without those that the finer posts know."""
        row, least = self._row_of.get(start), len(self.finer.answers) if self.finer else 0
        reach = 0 if row is None else min(len(self.answers), int(self._reach[row]))
        stops = np.array(self.posts[row + 1 : row + 1 + reach] if row is not None and reach > 0 else [], dtype=np.intp)
        far = np.flatnonzero(stops - start > least)
        rows = [(self.answers[length].costs[row], self.answers[length].needs[row]) for length in far]
        costs, needs = np.array(rows, dtype=np.int64).reshape(far.size, 2, self.known.grid.size).transpose(1, 0, 2)
        return stops[far], costs, needs

    def needs_of(self, start: int, end: int) -> Bytes:
        """Exact needs of a range, a slot each."""
        row = self._row_of[start]
        return self.answers[self._row_of[end + 1] - row - 1].needs[row]

    def _choice(self, start: int, code: int) -> PersistentChoice:
        kind = code // self._options
        if kind >= 2:
            return PersistentChoice("drop", self.posts[code - 2 * self._options])
        menu = (self.known.keeps, self.known.recomputes)[kind][code % self._options]
        return PersistentChoice(("keep", "recompute")[kind], int(menu.options[start]))

    def _reaches(self) -> Index:
        """For each post, how many of the posts after it still end a range that may run again."""
        run_ends = np.array(self.known.bytes.run_end, dtype=np.int64)[self._starts]
        return np.searchsorted(np.array(self.posts), run_ends, side="right") - 1 - np.arange(self._starts.size)

    def _fill(self, length: int) -> None:
        """All ranges of one length: their answers, and what a drop before them makes of these."""
        rows = self._starts.size - length
        lowest = self._lowest(rows, length)
        window = self._window(rows, length, lowest)
        best = self._drops(rows, length, lowest, window)
        if self.finer is None:
            self._keep(best, rows, length, window)
        costs = np.full((rows, self.known.grid.size), NEVER, dtype=np.int64)
        costs[:, window] = best
        costs[:, window.stop :] = best[:, -1:]
        costs[self._reach[:rows] <= length] = NEVER
        places = faster(costs, self.known.seconds.mask)
        needs = self._needs(costs[places] & self.known.seconds.mask, places, length)
        answers = settled(costs, self.known.grid, *places, needs, self.known.seconds.mask)
        if self.finer is not None:
            self._copy_finer(answers, self.finer, length)
        first = self._offsets[length]
        stored = self._all_needs[first : first + answers.needs.size].reshape(answers.needs.shape)
        stored[:] = answers.needs
        answers = answers._replace(needs=stored)
        self.answers.append(answers)
        self._rests.append(self._rest(answers, rows, length))
        self._extremes.append(_extremes(answers))
        self._spans.append(self._span(*self._extremes[-1]))
        self._rest_spans.append(self._span(*(needs + self._boundaries[:rows] for needs in self._extremes[-1])))

    def _entries(self, rows: int, length: int) -> Bytes:
        return self.known.entries[self._ends[length : length + rows]]

    def _own(self, starts: Index, stops: Index, ends: Index) -> Bytes:
        """Level that dropping the stages from each start up to each stop needs itself, in a range up to an end."""
        known = self.known
        places = np.minimum(known.drop_offsets[starts] + stops - starts - 1, known.drop_needs.size - 1)
        return known.drop_needs[places] + known.entries[ends]

    def _lowest(self, rows: int, length: int) -> Index:
        """The first slot that each drop fits in: a row per range, a column per post that it may stop at."""
        starts, stops = np.arange(rows)[:, None], np.arange(1, length + 1)
        own = self._own(self._starts[starts], self._starts[starts + stops], self._ends[starts + length])
        return np.where(self._reach[:rows, None] > length, self.known.grid.first(own), 0)

    def _window(self, rows: int, length: int, lowest: Index) -> slice:
        """The slots in which the fastest answer of any range of this length may differ from slot to slot."""
        pairs = [(self._spans[j - 1], self._rest_spans[length - j]) for j in range(1, length + 1)]
        spans = [_Span(max(a.least, b.least), max(a.most, b.most)) for a, b in pairs]
        if self.finer is None:
            spans += [self._keep_span(menu, rows, length) for menu in self.known.keeps]
        if self.finer is None and not length:
            spans += [self._span(menu.backward_needs, menu.backward_needs) for menu in self.known.recomputes]
        most = max([int(lowest.max(initial=0)), *(span.most for span in spans)])
        least = min([self.known.grid.size - 1, *(span.least for span in spans)])
        return slice(least, max(least, min(most, self.known.grid.size - 1)) + 1)

    def _keep_span(self, menu: Menu, rows: int, length: int) -> _Span:
        slowest = fastest = self._entries(rows, length)
        if length:
            slowest, fastest = (needs[1:] for needs in self._extremes[length - 1])
        own = np.maximum(self._entries(rows, length) + menu.forward_peak_bytes[:rows], menu.backward_needs[:rows])
        return self._span(slowest + menu.shifts[:rows], np.maximum(fastest + menu.shifts[:rows], own))

    def _span(self, least: Bytes, most: Bytes) -> _Span:
        return _Span(int(self.known.grid.first(least).min()), int(self.known.grid.first(most).max()))

    def _drops(self, rows: int, length: int, lowest: Index, window: slice) -> Bytes:
        """The cheapest drop of each range and slot of the window."""
        best = np.full((rows, window.stop - window.start), 2 * NEVER, dtype=np.int64)
        sums = np.empty_like(best)
        for j in range(1, length + 1):
            again, rest = self.answers[j - 1].costs[:rows, window], self._rests[length - j][j : j + rows, window]
            np.add(rest, again, out=sums)
            forbid(sums, lowest[:, j - 1] - window.start)
            np.minimum(best, sums, out=best)
        best -= self.known.runs[self._starts[:rows], None]
        return best

    def _keep(self, best: Bytes, rows: int, length: int, window: slice) -> None:
        """Write keeping a range's first stage, and running a single one again, where that is cheaper."""
        grid, entries = self.known.grid, self._entries(rows, length)
        for code, menu in enumerate(self.known.keeps):
            needs = np.maximum(entries + menu.forward_peak_bytes[:rows], menu.backward_needs[:rows])
            if length:
                rest = self.answers[length - 1]
                slots = reached_slots(rest.needs[1:], grid, self._keep_below[code][:rows], menu.shifts[:rows], window)
                sums = rest.costs[1:].ravel().take(slots, mode="clip")
                sums += menu.costs[:rows, None] + code
            else:
                needs = np.maximum(needs, entries + menu.shifts)
                sums = np.repeat(menu.costs[:, None] + code, best.shape[1], axis=1)
            forbid(sums, grid.first(needs) - window.start)
            np.minimum(best, sums, out=best)
        if not length:
            for code, menu in enumerate(self.known.recomputes, start=self._options):
                sums = np.repeat(menu.costs[:, None] + code, best.shape[1], axis=1)
                forbid(sums, grid.first(menu.backward_needs) - window.start)
                np.minimum(best, sums, out=best)

    def _rest(self, answers: Answers, rows: int, length: int) -> Bytes:
        slots = reached_slots(answers.needs, self.known.grid, self._below[:rows], self._boundaries[:rows])
        codes = 2 * self._options + np.arange(rows)
        return answers.costs.ravel().take(slots, mode="clip") + (self.known.runs[self._starts[:rows]] + codes)[:, None]

    def _needs(self, codes: Index, places: tuple[Index, Index], length: int) -> Bytes:
        """Exact needs of the choices made at some rows and slots."""
        rows, slots = places
        needs = np.empty(rows.size, dtype=np.int64)
        for option in range(self._options):
            self._keep_needs(needs, np.flatnonzero(codes == option), rows, slots, length, option)
            mine = np.flatnonzero(codes == self._options + option)
            if mine.size:
                needs[mine] = self.known.recomputes[option].backward_needs[rows[mine]]
        drops = np.flatnonzero(codes >= 2 * self._options)
        needs[drops] = self._drop_needs(rows[drops], codes[drops] - 2 * self._options, slots[drops], length)
        return needs

    def _keep_needs(self, needs: Bytes, mine: Index, rows: Index, slots: Index, length: int, option: int) -> None:
        if not mine.size:
            return
        menu, row, entries = self.known.keeps[option], rows[mine], self.known.entries[self._ends[rows[mine] + length]]
        rest = entries + menu.shifts[row]
        if length:
            below = self._keep_below[option][row, slots[mine]]
            rest = self._reached(length - 1, row + 1, slots[mine], below, menu.shifts[row])
        own = np.maximum(entries + menu.forward_peak_bytes[row], menu.backward_needs[row])
        needs[mine] = np.maximum(rest, own)

    def _drop_needs(self, rows: Index, posts: Index, slots: Index, length: int) -> Bytes:
        jumps, shifts = posts - rows, self._boundaries[posts]
        rest = self._reached(length - jumps, posts, slots, self._below[posts, slots], shifts)
        again = self._all_needs[self._offsets[jumps - 1] + rows * self.known.grid.size + slots]
        own = self._own(self._starts[rows], self._starts[posts], self._ends[rows + length])
        return np.maximum(np.maximum(rest, again), own)

    def _reached(self, lengths: Index | int, rows: Index, slots: Index, below: Index, shifts: Bytes) -> Bytes:
        """Exact needs of the fastest answers that fit into slots once shifts are added, with these added."""
        size = self.known.grid.size
        first = self._offsets[lengths] + rows * size
        above = self._all_needs[first + np.minimum(below + 1, size - 1)] + shifts
        return np.where(above <= self.known.grid.levels[slots], above, self._all_needs[first + below] + shifts)

    def _copy_finer(self, answers: Answers, finer: Ranges, length: int) -> None:
        """Where posts lie so close together that the range is known with all stages as posts, take that answer."""
        for row, start in enumerate(self._starts[: answers.costs.shape[0]].tolist()):
            stages = int(self._ends[row + length]) - start
            if stages < len(finer.answers):
                for mine, theirs in zip(answers, finer.answers[stages], strict=True):
                    mine[row] = theirs[start]


def _extremes(answers: Answers) -> tuple[Bytes, Bytes]:
    """Per row the needs of the slowest and of the fastest answer; out of the way where there is none."""
    first = (answers.costs < NEVER).argmax(axis=1)
    slowest = answers.needs[np.arange(first.size), first]
    return np.where(slowest == NOTHING, -NOTHING, slowest), answers.needs[:, -1].copy()


def forbid(costs: Bytes, lowest: Index) -> None:
    """Take the slots of each row before the lowest one out of the choice, for good: runs may still be subtracted."""
    most = int(lowest.max(initial=0))
    if most <= 0:
        return
    np.copyto(costs[:, :most], 2 * NEVER, where=np.arange(most) < lowest[:, None])
