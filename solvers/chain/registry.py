"""The menu of methods: one call from a problem to a replayed, certified solution, and one to a frontier."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from solvers.chain import baselines, exhaustive, ilp
from solvers.chain.candidates import (
    BASELINES,
    ReplayedSchedule,
    ends,
    of_baseline,
    of_baselines,
    of_rotor,
    replayed,
    rotor_frontier,
)
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.minimum_memory import shortage, shortage_of
from solvers.chain.offload_candidates import LINKED, WITH_COPIES, carries, drafted, entries_sent, leanest, sent_by
from solvers.problem.chain import Chain
from solvers.problem.chain_schedule import TRANSFERS, Schedule
from solvers.problem.chain_simulator import replay
from solvers.problem.link import Link
from solvers.problem.number_checks import check_time_limit
from solvers.problem.solution import Candidate, Problem, Solution

NAMES: tuple[str, ...] = (*BASELINES, "rotor", "ilp", "exhaustive", *LINKED, "auto")

DEFAULT_ILP_SECONDS = 60.0  # proves most chains of 16 stages
AUTO_ILP_SECONDS = 3.0  # what auto adds at most, unless it is given more
AUTO_ILP_STAGES = 12  # proven in seconds up to here (tests/solvers and benchmarks)
EXHAUSTIVE_STAGES = 6  # auto asks the oracle before it calls a budget of so short a chain infeasible
FRONTIER_BUDGETS = 6  # for methods that solve one budget at a time

_PROVEN = 1e-9  # relative distance from the bound that counts as none
_TIE = 1e-12  # relative difference of two sums of the same seconds
_TRUSTED = 1e-6  # a bound this far above a replayed schedule is wrong

_Point = TypeVar("_Point", ReplayedSchedule, Solution)


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
        found, proven, interrupted = of_baselines(problem.chain), 0.0, True
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
    copies = link if solver in WITH_COPIES and carries(chain, link) else None
    if solver in ("ilp", "exhaustive", "offload_ilp"):
        return _frontier_of_budgets(chain, solver, time_limit_seconds or DEFAULT_ILP_SECONDS)
    found = _all_entries(chain) if solver == "auto" else _entries(chain, solver)
    best = _undominated([*found, *(entries_sent(chain, solver, copies) if copies else [])])
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


def _bound(problem: Problem) -> float:
    """Seconds that every schedule needs, with or without copies as far as the link allows."""
    chain, link = problem.chain, problem.link
    return bound_seconds(chain, problem.budget_bytes, link if carries(chain, link) else None)


def _undominated(points: Iterable[_Point]) -> list[_Point]:
    best: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes or 0, p.seconds or 0.0)):
        if not best or (point.seconds or 0.0) < (best[-1].seconds or 0.0) * (1 - _PROVEN):
            best.append(point)
    return best


def _fastest(problem: Problem, found: Iterable[ReplayedSchedule]) -> ReplayedSchedule | None:
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


def _solution(entry: ReplayedSchedule, bound: float, spent_seconds: float) -> Solution:
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


def _infeasible(problem: Problem, solver: str, found: list[ReplayedSchedule], start: float) -> Solution:
    """What is missing: the smallest peak of the method's schedules; with shared tensors it may lie below the DP's."""
    chain = problem.chain
    why = None if solver in (*BASELINES, *LINKED) else shortage(chain)
    if carries(chain, problem.link) and solver in WITH_COPIES:
        found = [*found, leanest(problem, solver)]
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


def _answer(problem: Problem, solver: str, time_limit_seconds: float | None) -> tuple[list[ReplayedSchedule], float]:
    """What the method finds, and the bound that it proves itself."""
    if carries(problem.chain, problem.link):
        sent = sent_by(problem, solver, time_limit_seconds or DEFAULT_ILP_SECONDS) if solver in WITH_COPIES else []
        if solver == "auto":
            sent = sent + _drafted(problem, sent)
        return _answer_beside(problem, solver, time_limit_seconds, sent)[0], 0.0  # no method knows links in its proof
    return _answer_beside(problem, solver, time_limit_seconds, [])


def _drafted(problem: Problem, found: list[ReplayedSchedule]) -> list[ReplayedSchedule]:
    """What is faster than what is found already, unless that is proven to be the fastest."""
    best = _fastest(problem, found)
    if best is not None and best.seconds <= _bound(problem) * (1 + _PROVEN):
        return []
    return drafted(problem, math.inf if best is None else best.seconds)


def _answer_beside(
    problem: Problem, solver: str, time_limit_seconds: float | None, sent: list[ReplayedSchedule]
) -> tuple[list[ReplayedSchedule], float]:
    """The method's answers without copies, and those found already."""
    if solver in BASELINES:
        return of_baseline(problem.chain, solver), 0.0
    if solver == "offload_only":
        return [*sent, *(replayed(problem.chain, solver, s) for s in baselines.keep_all(problem.chain))], 0.0
    if solver in ("rotor", "pofo", "offload_ilp"):
        return sent + of_rotor(problem), 0.0
    if solver == "auto":
        return _auto(problem, time_limit_seconds, sent)
    if solver == "ilp":
        return _ilp(problem, time_limit_seconds or DEFAULT_ILP_SECONDS)
    return _proven(problem, solver, exhaustive.solve(problem))


def _ilp(problem: Problem, time_limit_seconds: float) -> tuple[list[ReplayedSchedule], float]:
    """The program's answer; the two ends are incumbents, so that a feasible budget is never called infeasible.

    Without shared tensors the program bounds the chain with them; where its answer does not fit beside
    them, the program with all of them counted throughout gives one that does.
    """
    chain, deadline = problem.chain, time.perf_counter() + time_limit_seconds
    incumbents = [replayed(chain, "ilp", schedule) for schedule in ends(chain)]
    bare = replace(problem, chain=replace(chain, shared=()))
    share = time_limit_seconds / 2 if chain.shared else time_limit_seconds
    found, proven = _proven(problem, "ilp", ilp.solve(bare, share))
    if chain.shared and proven < math.inf and not any(f.peak_bytes <= problem.budget_bytes for f in found):
        left = max(0.1, deadline - time.perf_counter())
        found += _proven(problem, "ilp", ilp.solve(replace(problem, chain=chain.folded()), left))[0]
    return found + incumbents, proven


def _auto(
    problem: Problem, time_limit_seconds: float | None, sent: list[ReplayedSchedule]
) -> tuple[list[ReplayedSchedule], float]:
    start, chain = time.perf_counter(), problem.chain
    found = sent + of_baselines(chain) + of_rotor(problem)
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


def _proven(problem: Problem, solver: str, candidate: Candidate) -> tuple[list[ReplayedSchedule], float]:
    schedules = [] if candidate.schedule is None else [candidate.schedule]
    return [replayed(problem.chain, solver, schedule) for schedule in schedules], candidate.lower_bound_seconds


def _all_entries(chain: Chain) -> list[ReplayedSchedule]:
    return [*of_baselines(chain), *rotor_frontier(chain)]


def _entries(chain: Chain, solver: str) -> list[ReplayedSchedule]:
    """All schedules of a method that the frontier is chosen from."""
    if solver in BASELINES:
        return of_baseline(chain, solver)
    if solver == "offload_only":
        return [replayed(chain, solver, schedule) for schedule in baselines.keep_all(chain)]
    return list(rotor_frontier(chain))


def _frontier_of_budgets(chain: Chain, solver: str, time_limit_seconds: float) -> list[Solution]:
    low = shortage(chain).minimum_budget_bytes
    high = max(low, replay(chain, baselines.keep_all(chain)[0]).peak_bytes)
    steps = FRONTIER_BUDGETS - 1
    budgets = [low + (high - low) * i // steps for i in range(steps + 1)]
    share = time_limit_seconds / len(budgets)
    solutions = [solve_chain(Problem(chain=chain, budget_bytes=b), solver, share) for b in budgets]
    feasible = [s for s in solutions if s.seconds is not None and s.peak_bytes is not None]
    return _undominated(feasible)
