"""The menu of methods: one call from a problem to a replayed, certified solution, and one to a frontier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from solvers import chen_greedy, chen_sqrt, exhaustive, ilp, keep_all, offload, recompute_all, revolve
from solvers.chain import Chain
from solvers.link import Link
from solvers.lower_bound import bound_seconds
from solvers.minimum_memory import shortage, shortage_of, smallest_schedule
from solvers.parcels import has_parcels, without_parcels
from solvers.placement import Placement
from solvers.problem import Candidate, Problem, Solution, check_time_limit
from solvers.rotor import Table
from solvers.schedule import TRANSFERS, Schedule
from solvers.simulator import replay

BASELINES: dict[str, Callable[[Chain], list[Schedule]]] = {
    "keep_all": keep_all.schedules,
    "recompute_all": recompute_all.schedules,
    "chen_sqrt": chen_sqrt.schedules,
    "chen_greedy": chen_greedy.schedules,
    "revolve": revolve.schedules,
}
LINKED: tuple[str, ...] = ("offload_only",)  # they need a link
WITH_COPIES: tuple[str, ...] = (*LINKED, "rotor", "auto")  # they use one
NAMES: tuple[str, ...] = (*BASELINES, "rotor", "ilp", "exhaustive", *LINKED, "auto")

DEFAULT_ILP_SECONDS = 60.0  # proves most chains of 16 stages
AUTO_ILP_SECONDS = 3.0  # what auto adds at most, unless it is given more
AUTO_ILP_STAGES = 12  # proven in seconds up to here (tests/solvers and benchmarks)
EXHAUSTIVE_STAGES = 6  # auto asks the oracle before it calls a budget of so short a chain infeasible
FRONTIER_POINTS = 100  # replayed and returned; a curve needs no more
LONG_CHAIN = 250  # stages from which a replay takes a good part of a second, and methods show fewer candidates
LONG_FRONTIER_POINTS = 30
LONG_CANDIDATES = 4  # of each baseline within auto
FRONTIER_BUDGETS = 6  # for methods that solve one budget at a time
LINK_BUDGETS = 24  # of a frontier with copies, each of which costs some placements
SENT_PARTS = 4  # the first quarter, half, .. of the stages are taken as away to find schedules worth placing
SENT_POINTS = 30  # of each of these tables

_PROVEN = 1e-9  # relative distance from the bound that counts as none
_TIE = 1e-12  # relative difference of two sums of the same seconds
_TRUSTED = 1e-6  # a bound this far above a replayed schedule is wrong


class _Found(NamedTuple):
    solver: str
    schedule: Schedule
    peak_bytes: int
    seconds: float


_Point = TypeVar("_Point", _Found, Solution)


def solver_names(*, linked: bool = True) -> tuple[str, ...]:
    """The methods that ``solve_chain`` and ``frontier`` know; ``linked=False`` leaves out those that need a link."""
    return NAMES if linked else tuple(name for name in NAMES if name not in LINKED)


def solve_chain(problem: Problem, solver: str = "auto", time_limit_seconds: float | None = None) -> Solution:
    """The fastest schedule that ``solver`` finds within the budget, replayed, with a bound that holds for all.

    Args:
        problem: the chain, its budget in bytes, and the link to host memory if there is one. ``auto`` and ``rotor``
            weigh what the link can carry beside recomputation; methods that know no link leave it unused.
        solver: one of ``solver_names()``; ``auto`` takes the fastest of all quick methods (of a sample of the
            baselines' candidates for more than 250 stages) and, for chains of up to 12 stages that they leave
            unproven, asks ``ilp``.
        time_limit_seconds: for ``ilp`` (60 where None) and the part that ``auto`` gives it (3 where None).

    After Ctrl-C the solution is the best that the baselines have, marked ``interrupted``.

    Raises:
        ValueError: an unknown solver, an impossible time limit, a chain too large for ``exhaustive``, or no usable link
            for a method that needs one.
    """
    _check(solver, time_limit_seconds, problem.link)
    start = time.perf_counter()
    interrupted = False
    try:
        found, proven = _answer(problem, solver, time_limit_seconds)
    except KeyboardInterrupt:
        found, proven, interrupted = _baselines(problem.chain), 0.0, True
    best = _fastest(problem, found)
    if best is None:
        return _infeasible(problem, solver, found, start)
    if proven > best.seconds * (1 + _TRUSTED):
        proven = 0.0  # a schedule at hand refutes it: a solver's numerical error must not pass for a proof
    bound = max(_bound(problem), proven)
    return replace(_solution(best, bound, time.perf_counter() - start), interrupted=interrupted)


def frontier(
    chain: Chain, solver: str = "auto", time_limit_seconds: float | None = None, link: Link | None = None
) -> list[Solution]:
    """Solutions that no other one of the method beats, by rising peak and falling seconds.

    Each one is the answer to its own peak as a budget. ``rotor`` and ``auto`` return at most about 100 of them (30 for
    more than 250 stages), ``ilp`` a handful, between the smallest and the unplanned peak. With a link that can carry
    something the methods that weigh it answer two dozen budgets beside.
    """
    _check(solver, time_limit_seconds, link)
    start = time.perf_counter()
    copies = link if solver in WITH_COPIES and _carries(chain, link) else None
    if solver in ("ilp", "exhaustive"):
        return _frontier_of_budgets(chain, solver, time_limit_seconds or DEFAULT_ILP_SECONDS)
    found = _all_entries(chain) if solver == "auto" else _entries(chain, solver)
    best = _undominated([*found, *(_entries_sent(chain, solver, copies) if copies else [])])
    spent = (time.perf_counter() - start) / max(1, len(best))
    own = [Problem(chain=chain, budget_bytes=entry.peak_bytes, link=link) for entry in best]
    return [_solution(entry, _bound(problem), spent) for entry, problem in zip(best, own, strict=True)]


def _check(solver: str, time_limit_seconds: float | None, link: Link | None) -> None:
    if solver not in NAMES:
        raise ValueError(f"a solver: expected one of {', '.join(NAMES)}, got {solver!r}; choose one of them")
    if solver in LINKED and (link is None or not link.usable):
        raise ValueError(
            f"{solver}: expected a link with rates above zero and host memory, got {link!r}; give one, or choose 'auto'"
        )
    check_time_limit(time_limit_seconds)


def _carries(chain: Chain, link: Link | None) -> bool:
    """Whether anything of the chain can travel; where not, all is as without a link."""
    return link is not None and link.usable and has_parcels(chain, link.host_bytes)


def _bound(problem: Problem) -> float:
    """Seconds that every schedule needs; with a link as if all that can travel were away."""
    chain = problem.chain
    return bound_seconds(without_parcels(chain) if _carries(chain, problem.link) else chain, problem.budget_bytes)


def _undominated(points: Iterable[_Point]) -> list[_Point]:
    best: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes or 0, p.seconds or 0.0)):
        if not best or (point.seconds or 0.0) < (best[-1].seconds or 0.0) * (1 - _PROVEN):
            best.append(point)
    return best


def _replayed(chain: Chain, solver: str, schedule: Schedule, link: Link | None = None) -> _Found:
    result = replay(chain, schedule, link)
    return _Found(solver, schedule, result.peak_bytes, result.seconds)


def _fastest(problem: Problem, found: Iterable[_Found]) -> _Found | None:
    """The fastest that fits; of equally fast ones that with the fewest runs and copies, so that none is for nothing."""
    fitting = [entry for entry in found if entry.peak_bytes <= problem.budget_bytes]
    if not fitting:
        return None
    least = min(entry.seconds for entry in fitting) * (1 + _TIE)
    ties = [entry for entry in fitting if entry.seconds <= least]
    return min(ties, key=lambda entry: (*_beside(entry.schedule), entry.peak_bytes))


def _beside(schedule: Schedule) -> tuple[int, int, int]:
    """What a schedule does beside one step: stages that run again, ops that do so inside stages, and copies."""
    copies = sum(action.kind in TRANSFERS for action in schedule.actions)
    return schedule.forward_runs(), schedule.choices_inside(), copies


def _solution(entry: _Found, bound: float, spent_seconds: float) -> Solution:
    bound = min(bound, entry.seconds)  # the last digits of sums in another order
    return Solution(
        solver=entry.solver,
        status="optimal" if entry.seconds <= bound * (1 + _PROVEN) else "feasible",
        schedule=entry.schedule,
        peak_bytes=entry.peak_bytes,
        seconds=entry.seconds,
        lower_bound_seconds=bound,
        solve_seconds=spent_seconds,
    )


def _infeasible(problem: Problem, solver: str, found: list[_Found], start: float) -> Solution:
    """What is missing: the smallest peak of the method's schedules; with shared tensors it may lie below the DP's."""
    chain = problem.chain
    why = None if solver in (*BASELINES, *LINKED) else shortage(chain)
    if _carries(chain, problem.link) and solver in WITH_COPIES:
        found = [*found, _leanest(problem, solver)]
    lowest = min(found, key=lambda entry: entry.peak_bytes, default=None)
    if lowest is not None and (why is None or lowest.peak_bytes < why.minimum_budget_bytes):
        why = shortage_of(chain, lowest.schedule, problem.link)
    assert why is not None
    return Solution(
        solver=solver,
        status="infeasible",
        schedule=None,
        peak_bytes=None,
        seconds=None,
        lower_bound_seconds=_bound(replace(problem, budget_bytes=why.minimum_budget_bytes)),  # finite
        solve_seconds=time.perf_counter() - start,
        shortage=why,
    )


def _leanest(problem: Problem, solver: str) -> _Found:
    """The smallest peak that the method reaches with copies."""
    assert problem.link is not None
    methods = ("rotor", "auto") if solver == "auto" else (solver,)
    candidates = [p for m in methods for p in _placements(problem.chain, problem.link.host_bytes, m)]
    return _replayed(problem.chain, solver, offload.smallest(candidates), problem.link)


def _answer(problem: Problem, solver: str, time_limit_seconds: float | None) -> tuple[list[_Found], float]:
    """What the method finds, and the bound that it proves itself."""
    if _carries(problem.chain, problem.link):
        sent = _sent(problem, solver) if solver in WITH_COPIES else []
        return _answer_beside(problem, solver, time_limit_seconds, sent)[0], 0.0  # no method knows links in its proof
    return _answer_beside(problem, solver, time_limit_seconds, [])


def _answer_beside(
    problem: Problem, solver: str, time_limit_seconds: float | None, sent: list[_Found]
) -> tuple[list[_Found], float]:
    """The method's answers without copies, and those found already."""
    if solver in BASELINES:
        return _baseline(problem.chain, solver), 0.0
    if solver == "offload_only":
        return [*sent, *(_replayed(problem.chain, solver, s) for s in keep_all.schedules(problem.chain))], 0.0
    if solver == "rotor":
        return sent + _rotor(problem), 0.0
    if solver == "auto":
        return _auto(problem, time_limit_seconds, sent)
    if solver == "ilp":
        return _ilp(problem, time_limit_seconds or DEFAULT_ILP_SECONDS)
    return _proven(problem, solver, exhaustive.solve(problem))


def _sent(problem: Problem, solver: str) -> list[_Found]:
    """The fastest schedules with copies; ``auto`` asks its parts, so that it is never slower than they are."""
    link = problem.link
    assert link is not None
    methods = ("offload_only", "rotor", "auto") if solver == "auto" else (solver,)
    found = [(m, offload.fastest(problem, link, _placements(problem.chain, link.host_bytes, m))) for m in methods]
    named = {"auto": "rotor"}
    return [_replayed(problem.chain, named.get(m, m), schedule, link) for m, best in found for schedule in best]


@lru_cache(maxsize=4)
def _placements(chain: Chain, host_bytes: int | None, solver: str) -> tuple[Placement, ...]:
    """What the method places. Remembered: parcels leave in the same order for all budgets."""
    if solver == "offload_only":
        return offload.placements(chain, keep_all.schedules(chain), host_bytes)
    entries = _baselines(chain) if solver == "auto" else [*_frontier_entries(chain), *_rotor_of_sent(chain)]
    return offload.placements(chain, (entry.schedule for entry in entries), host_bytes)


def _rotor_of_sent(chain: Chain) -> list[_Found]:
    """Schedules of tables for which the parcels of the first stages, whose copies have most time, count as away."""
    count = len(chain.stages)
    parts = 1 if count > LONG_CHAIN else SENT_PARTS
    variants = dict.fromkeys(without_parcels(chain, count * part // parts) for part in range(1, parts + 1))
    schedules = [smallest_schedule(variant) for variant in variants]
    for variant in variants:
        table = Table(variant.folded())
        schedules += [table.schedule(point) for point in _sample(table.points(), SENT_POINTS)]
    return [_replayed(chain, "rotor", schedule) for schedule in schedules]


def _baseline(chain: Chain, solver: str) -> list[_Found]:
    return [_replayed(chain, solver, schedule) for schedule in BASELINES[solver](chain)]


def _baselines(chain: Chain) -> list[_Found]:
    """What all baselines find; of long chains an even sample of their candidates, since each one is replayed."""
    most = LONG_CANDIDATES if len(chain.stages) > LONG_CHAIN else None
    made = [(name, _sample(schedules(chain), most)) for name, schedules in BASELINES.items()]
    return [_replayed(chain, name, schedule) for name, found in made for schedule in found]


_Item = TypeVar("_Item")


def _sample(items: list[_Item], most: int | None) -> list[_Item]:
    """Evenly picked items, the first and the last among them."""
    if most is None or len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _rotor(problem: Problem) -> list[_Found]:
    """The table's answer, beside the two ends that the grid may miss: nothing recomputed, and the smallest peak.

    Where stages share tensors, the table counts them throughout and true peaks lie lower: then every schedule of the
    frontier is a candidate too. Where stages have menus, so is what the table finds without them: its memory grid is
    another one, and more options must never make a plan slower.
    """
    chain = problem.chain
    found = [_replayed(chain, "rotor", schedule) for schedule in _of_table(chain, problem.budget_bytes)]
    if any(len(stage.options) > 1 for stage in chain.stages):
        whole = replace(chain, stages=tuple(replace(stage, options=stage.options[:1]) for stage in chain.stages))
        found += [_replayed(chain, "rotor", schedule) for schedule in _of_table(whole, problem.budget_bytes)]
    return found


def _of_table(chain: Chain, budget_bytes: int) -> list[Schedule]:
    table = _table(chain.folded())
    points = [point for point in table.points() if point.peak_bytes <= budget_bytes]
    schedules = [*([table.schedule(points[-1])] if points else []), *_ends(chain)]
    return schedules + [entry.schedule for entry in _frontier_entries(chain)] if chain.shared else schedules


def _ilp(problem: Problem, time_limit_seconds: float) -> tuple[list[_Found], float]:
    """The program's answer; the two ends are incumbents, so that a feasible budget is never called infeasible.

    Without shared tensors the program bounds the chain with them; where its answer does not fit beside
    them, the program with all of them counted throughout gives one that does.
    """
    chain, deadline = problem.chain, time.perf_counter() + time_limit_seconds
    incumbents = [_replayed(chain, "ilp", schedule) for schedule in _ends(chain)]
    bare = replace(problem, chain=replace(chain, shared=()))
    share = time_limit_seconds / 2 if chain.shared else time_limit_seconds
    found, proven = _proven(problem, "ilp", ilp.solve(bare, share))
    if chain.shared and proven < math.inf and not any(f.peak_bytes <= problem.budget_bytes for f in found):
        left = max(0.1, deadline - time.perf_counter())
        found += _proven(problem, "ilp", ilp.solve(replace(problem, chain=chain.folded()), left))[0]
    return found + incumbents, proven


def _ends(chain: Chain) -> list[Schedule]:
    return [*keep_all.schedules(chain), smallest_schedule(chain)]


@lru_cache(maxsize=4)
def _table(chain: Chain) -> Table:
    """The last tables are remembered: asking for several budgets of one chain costs one solve."""
    return Table(chain)


def _auto(problem: Problem, time_limit_seconds: float | None, sent: list[_Found]) -> tuple[list[_Found], float]:
    start, chain = time.perf_counter(), problem.chain
    found = sent + _baselines(chain) + _rotor(problem)
    best = _fastest(problem, found)
    bound = bound_seconds(chain, problem.budget_bytes)
    open_gap = bound < math.inf if best is None else best.seconds > bound * (1 + _PROVEN)
    limit = AUTO_ILP_SECONDS if time_limit_seconds is None else time_limit_seconds - (time.perf_counter() - start)
    if not open_gap or limit <= 0 or len(chain.stages) > AUTO_ILP_STAGES:
        return found, 0.0
    more, proven = _ilp(problem, limit)
    if len(chain.stages) <= EXHAUSTIVE_STAGES and _fastest(problem, found + more) is None:
        return _proven(problem, "exhaustive", exhaustive.solve(problem))  # schedules of no other method's class
    return found + more, proven


def _proven(problem: Problem, solver: str, candidate: Candidate) -> tuple[list[_Found], float]:
    schedules = [] if candidate.schedule is None else [candidate.schedule]
    return [_replayed(problem.chain, solver, schedule) for schedule in schedules], candidate.lower_bound_seconds


def _all_entries(chain: Chain) -> list[_Found]:
    return [*_baselines(chain), *_frontier_entries(chain)]


def _entries(chain: Chain, solver: str) -> list[_Found]:
    """All schedules of a method that the frontier is chosen from."""
    if solver in BASELINES:
        return _baseline(chain, solver)
    if solver == "offload_only":
        return [_replayed(chain, solver, schedule) for schedule in keep_all.schedules(chain)]
    return list(_frontier_entries(chain))


def _entries_sent(chain: Chain, solver: str, link: Link) -> list[_Found]:
    """Answers with copies for budgets from the smallest peak they reach to that of keeping everything."""
    leanest = _leanest(Problem(chain=chain, budget_bytes=0, link=link), solver)
    low, steps = leanest.peak_bytes, LINK_BUDGETS - 1
    high = max(low, replay(chain, keep_all.schedules(chain)[0]).peak_bytes)
    budgets = [low + (high - low) * i // steps for i in range(steps + 1)]
    return [found for b in budgets for found in _sent(Problem(chain=chain, budget_bytes=b, link=link), solver)]


@lru_cache(maxsize=1)
def _frontier_entries(chain: Chain) -> tuple[_Found, ...]:
    schedules = _ends(chain)
    for variant in dict.fromkeys((chain.folded(), replace(chain, shared=()))):
        table = _table(variant)
        most = LONG_FRONTIER_POINTS if len(chain.stages) > LONG_CHAIN else FRONTIER_POINTS
        schedules += [table.schedule(point) for point in _sample(table.points(), most)]
    return tuple(_replayed(chain, "rotor", schedule) for schedule in schedules)


def _frontier_of_budgets(chain: Chain, solver: str, time_limit_seconds: float) -> list[Solution]:
    low = shortage(chain).minimum_budget_bytes
    high = max(low, replay(chain, keep_all.schedules(chain)[0]).peak_bytes)
    steps = FRONTIER_BUDGETS - 1
    budgets = [low + (high - low) * i // steps for i in range(steps + 1)]
    share = time_limit_seconds / len(budgets)
    solutions = [solve_chain(Problem(chain=chain, budget_bytes=b), solver, share) for b in budgets]
    feasible = [s for s in solutions if s.seconds is not None and s.peak_bytes is not None]
    return _undominated(feasible)
