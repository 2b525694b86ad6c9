"""Integer program for keeping, sending and dropping at once, with the clocks of both copy engines: small chains.

Formulation: a path of the choices of ``solvers.chain.offload_choices`` through the stages. Positions are the forwards
in order, then the backwards. For each offload unit of each choice two rising rows of binaries say by which position its
device bytes are given up and by which it is fetched back; in between they are away. Bytes fit at every position.
Continuous clocks: each position starts after the one before, after the copies out that it relies on and the copies back
that it uses; the engines take copies in the order of making and of use. Clocks are tied to binaries by large constants.

Guarantee: the fastest of its class (single-level runs, copies in these orders, placed between positions) where HiGHS
ends in time; then replayed, where it may gain what its largest needs leave out. The bound is of the class alone, so
none is returned.
Complexity: O(L^2 P) binaries for P offload units of each choice, exponential time; chains of up to 8 stages are proven
in seconds where few offload units matter. Units: bytes and seconds, both scaled inside the program.
Paper: Jain et al., "Checkmate" (2020), section 4, for binaries per position; Beaumont, Eyraud-Dubois, Shilova (2021),
section 3, for the copies' constraints.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from solvers.chain.offload_choices import ChoiceStep, schedule_of, steps_from
from solvers.chain.persistent import ChainBytes, PersistentChoice
from solvers.highs import Floats, Program
from solvers.problem.chain_schedule import Action, Schedule
from solvers.problem.link import Link
from solvers.problem.number_checks import check_size
from solvers.problem.solution import Candidate, Problem

MOST_STAGES = 16  # the program of more has thousands of binaries that nothing ties together tightly
_SLACK = 1e-6  # relative: a schedule as fast as the known one stays within HiGHS's tolerance
_Term = tuple[int, float]


class _Sent(NamedTuple):
    """The variables of one offload unit of one choice; ``away`` and ``back`` by position, between making and use."""

    stage: int
    unit: int
    size_bytes: int
    chosen: int  # that the choice is made
    sent: int
    gone: dict[int, int]
    back: dict[int, int]


def solve(problem: Problem, link: Link, time_limit_seconds: float = 60.0, known_seconds: float = math.inf) -> Candidate:
    """The fastest schedule of the class found in the time; none where no schedule of the class fits.

    Args:
        problem, link: what to solve.
        time_limit_seconds: that HiGHS may take.
        known_seconds: of a schedule at hand; slower ones are not looked for, and all clocks are tighter.

    Raises:
        ValueError: the chain is too long for the program to be solved.

    >>> from solvers.problem.chain import Chain, Option, Stage
    >>> way = Option(forward_seconds=1, backward_seconds=2, kept_bytes=4, forward_peak_bytes=6, backward_peak_bytes=1,
    ...              recompute_seconds=1, recompute_peak_bytes=4, offload_units=(4,))
    >>> stage = Stage(name="s", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    >>> link = Link(to_host_bytes_per_second=8.0, to_device_bytes_per_second=8.0)
    >>> found = solve(Problem(chain=Chain(stages=(stage,) * 3), budget_bytes=12), link).schedule
    >>> [action.stage for action in found.actions if action.kind == "offload"]
    [0]
    """
    chain = problem.chain
    check_size("offload_ilp", len(chain.stages), MOST_STAGES, "stages", "pofo")
    if chain.optimizer_peak_bytes > problem.budget_bytes:
        return Candidate(schedule=None)
    return Candidate(schedule=_OffloadModel(problem, link, known_seconds).solve(time_limit_seconds))


class _OffloadModel:
    """Positions 0 .. L-1 are the forwards of stages 0 .. L-1, L .. 2L-1 the backwards of stages L-1 .. 0."""

    def __init__(self, problem: Problem, link: Link, known_seconds: float) -> None:
        chain = problem.chain
        self._link, self._count = link, len(chain.stages)
        self._bytes = ChainBytes(chain.folded())
        self._room = problem.budget_bytes - chain.resident_bytes
        self._scale = 1e4 / max(1, problem.budget_bytes)
        self._second = 1e2 / (chain.unplanned_seconds or 1.0)
        self._program = Program()
        self._choices: list[tuple[int, ChoiceStep, int]] = []
        for k in range(self._count):
            self._choices += [(k, step, self._program.variable()) for step in steps_from(self._bytes, k)]
        self._path()
        self._sent = [sent for k, step, chosen in self._choices for sent in self._offload_units(k, step, chosen)]
        self._horizon = min(self._longest(), known_seconds * (1 + _SLACK)) * self._second
        self._starts = [self._clock() for _ in range(2 * self._count)]
        self._fit()
        self._clocks()
        self._host(link.host_bytes)
        self._objective()

    def solve(self, time_limit_seconds: float) -> Schedule | None:
        """The schedule of the best values; None where there are none."""
        values = self._program.solve(time_limit_seconds=time_limit_seconds).values
        return None if values is None else self._schedule(values)

    def _clock(self) -> int:
        return self._program.variable(upper=self._horizon, integral=False)

    def _path(self) -> None:
        """One choice begins at each stage where another ends."""
        for k in range(self._count):
            begins = [(x, 1.0) for start, _, x in self._choices if start == k]
            ends = [(x, -1.0) for _, step, x in self._choices if step.stop == k]
            self._program.row(begins + ends, lower=0.0 if k else 1.0, upper=0.0 if k else 1.0)

    def _offload_units(self, k: int, step: ChoiceStep, chosen: int) -> list[_Sent]:
        between = range(step.stop, 2 * self._count - step.stop + (step.stop - 1 - k))
        found = []
        for unit, size_bytes in enumerate(step.offload_units):
            gone, back = ({p: self._program.variable() for p in between} for _ in range(2))
            sent = _Sent(k, unit, size_bytes, chosen, self._program.variable(), gone, back)
            self._program.row([(sent.sent, 1.0), (chosen, -1.0)], upper=0.0)
            self._rising(sent)
            found.append(sent)
        return found

    def _rising(self, sent: _Sent) -> None:
        for row in (sent.gone, sent.back):
            for p, q in pairwise(row):
                self._program.row([(row[p], 1.0), (row[q], -1.0)], upper=0.0)
        for p in sent.gone:
            self._program.row([(sent.back[p], 1.0), (sent.gone[p], -1.0)], upper=0.0)
            self._program.row([(sent.gone[p], 1.0), (sent.sent, -1.0)], upper=0.0)

    def _fit(self) -> None:
        """Bytes at every position at which a choice runs: what earlier ones hold and did not send, and its need."""
        for position in range(2 * self._count):
            forward = position < self._count
            k = position if forward else 2 * self._count - 1 - position
            terms: list[_Term] = [(x, float(step.held_bytes)) for _, step, x in self._choices if step.stop <= k]
            terms += [
                (x, float(step.forward_bytes if forward else step.backward_bytes))
                for start, step, x in self._choices
                if start == k
            ]
            for sent in self._sent:
                if position in sent.gone:
                    terms += [(sent.gone[position], -sent.size_bytes), (sent.back[position], float(sent.size_bytes))]
            self._program.row([(x, size * self._scale) for x, size in terms], upper=self._room * self._scale)

    def _clocks(self) -> None:
        for position in range(1, 2 * self._count):
            self._after(self._starts[position], self._end(position - 1), 0.0, [])
        self._engine_out()
        self._engine_back()

    def _engine_out(self) -> None:
        before: int | None = None
        for sent in sorted(self._sent, key=lambda s: (s.stage, -s.size_bytes, s.unit)):
            done = self._clock()
            seconds = self._link.to_host_seconds(sent.size_bytes) * self._second
            self._after(done, self._end(sent.stage), 0.0, [(sent.sent, seconds)], where=[sent.sent])
            if before is not None:
                self._after(done, [(before, 1.0)], 0.0, [(sent.sent, seconds)])
            for position, gone in sent.gone.items():
                self._after(self._starts[position], [(done, 1.0)], 0.0, [], where=[gone])
            before = done

    def _engine_back(self) -> None:
        before: int | None = None
        for sent in sorted(self._sent, key=lambda s: (-s.stage, -s.size_bytes, s.unit)):
            done = self._clock()
            seconds = self._link.to_device_seconds(sent.size_bytes) * self._second
            if before is not None:
                self._after(done, [(before, 1.0)], 0.0, [(sent.sent, seconds)])
            for position in sent.gone:  # still away there: fetched after it at the earliest
                terms = [(sent.gone[position], 1.0), (sent.back[position], -1.0)]
                self._after(done, self._end(position), seconds, [], where_terms=terms)
            use = 2 * self._count - 1 - sent.stage
            self._after(self._starts[use], [(done, 1.0)], 0.0, [], where=[sent.sent])
            before = done

    def _after(
        self,
        later: int,
        earlier: list[_Term],
        seconds: float,
        more: list[_Term],
        where: list[int] | None = None,
        where_terms: list[_Term] | None = None,
    ) -> None:
        """``later >= earlier + seconds + more``, where all of ``where`` are 1."""
        terms = [(later, 1.0), *((x, -c) for x, c in earlier), *((x, -c) for x, c in more)]
        switches = [(x, 1.0) for x in where or ()] + (where_terms or [])
        bound = seconds - (self._horizon if switches else 0.0)
        self._program.row(_merged([*terms, *((x, -self._horizon * c) for x, c in switches)]), lower=bound)

    def _end(self, position: int) -> list[_Term]:
        """When the choice that runs at a position ends."""
        forward = position < self._count
        k = position if forward else 2 * self._count - 1 - position
        runs = [
            (s.forward_seconds if forward else s.backward_seconds, x) for start, s, x in self._choices if start == k
        ]
        return [(self._starts[position], 1.0), *((x, seconds * self._second) for seconds, x in runs)]

    def _longest(self) -> float:
        """No clock of a fastest schedule shows more: every stage's slowest choice, and every copy waited for."""
        slowest = sum(
            max(s.forward_seconds + s.backward_seconds for start, s, _ in self._choices if start == k)
            for k in range(self._count)
        )
        link, sizes = self._link, [sent.size_bytes for sent in self._sent]
        return slowest + sum(link.to_host_seconds(size) + link.to_device_seconds(size) for size in sizes)

    def _host(self, host_bytes: int | None) -> None:
        """Whatever was sent is in host memory at the turn."""
        if host_bytes is not None and self._sent:
            scale = 1e4 / max(1, host_bytes)
            terms = [(sent.sent, sent.size_bytes * scale) for sent in self._sent]
            self._program.row(terms, upper=host_bytes * scale)

    def _objective(self) -> None:
        end = self._end(2 * self._count - 1)
        self._program.row(end, upper=self._horizon)
        for variable, seconds in end:
            self._program.costs[variable] += seconds

    def _schedule(self, values: Floats) -> Schedule:
        chosen = {k: step.choice for k, step, x in self._choices if values[x] > 0.5}
        plain = schedule_of(self._count, chosen).actions
        places = self._places(plain, chosen)
        inserted: list[list[Action]] = [[] for _ in range(len(plain) + 1)]
        travels = [(s, *_moves(s, values)) for s in self._sent if values[s.sent] > 0.5 and _moves(s, values)]
        for sent, _, _ in sorted(travels, key=lambda t: (t[0].stage, -t[0].size_bytes, t[0].unit)):
            inserted[places[sent.stage] + 1].append(Action("offload", sent.stage, sent.unit))
        for sent, gone, _ in sorted(travels, key=lambda t: (t[1], t[0].stage, -t[0].size_bytes)):
            inserted[places[gone]].append(Action("release", sent.stage, sent.unit))
        for sent, _, back in sorted(travels, key=lambda t: (t[2], -t[0].stage, -t[0].size_bytes)):
            inserted[places[back]].append(Action("prefetch", sent.stage, sent.unit))
        parts = zip(inserted, (*plain, None), strict=True)
        return Schedule(actions=tuple(a for more, own in parts for a in (*more, *([own] if own is not None else []))))

    def _places(self, plain: tuple[Action, ...], chosen: dict[int, PersistentChoice]) -> list[int]:
        """Index of the action with which each position begins."""
        firsts = [
            next(i for i, a in enumerate(plain) if a.kind == "forward" and a.stage == k) for k in range(self._count)
        ]
        turn, places = firsts[-1], list(firsts)
        starts = sorted(chosen)
        for k in reversed(range(self._count)):
            start = max(s for s in starts if s <= k)
            places.append(next(i for i, a in enumerate(plain) if i > turn and a.stage == start and a.kind != "free"))
        return places


def _moves(sent: _Sent, values: Floats) -> tuple[int, int] | tuple[()]:
    """Positions before which an offload unit leaves and comes back; none where it never is away."""
    away = [p for p in sent.gone if values[sent.gone[p]] > 0.5 and values[sent.back[p]] < 0.5]
    return (away[0], away[-1] + 1) if away else ()


def _merged(terms: list[_Term]) -> list[_Term]:
    total: dict[int, float] = {}
    for variable, factor in terms:
        total[variable] = total.get(variable, 0.0) + factor
    return list(total.items())
