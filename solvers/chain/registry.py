"""The chain methods by name: from a problem to a replayed, certified solution, and from a chain to a frontier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from solvers.chain import exhaustive, ilp
from solvers.chain.baselines import keep_all
from solvers.chain.candidates import (
    BASELINES,
    NEED_LINK,
    USE_LINK,
    ReplayedSchedule,
    all_baseline_schedules,
    baseline_schedules,
    can_offload,
    even_budgets,
    extreme_schedules,
    frontier_with_copies,
    quick_schedules,
    replayed,
    rotor_frontier,
    rotor_points,
    rotor_schedules,
    schedules_for_slower_links,
    schedules_with_copies,
    smallest_with_copies,
)
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.persistent import shortage, shortage_of
from solvers.problem.chain import Chain, Link
from solvers.problem.deadline import Deadline, left_seconds, unlimited
from solvers.problem.plain_data import check_time_limit
from solvers.problem.schedule import TRANSFERS, Schedule
from solvers.problem.solution import Accepts, Candidate, Problem, Solution, check_solver, undominated

DEFAULT_ILP_SECONDS = 60.0  # proves most chains of 16 stages
AUTO_ILP_SECONDS = 3.0  # what auto adds at most, unless it is given more
AUTO_ILP_STAGES = 12  # proven in seconds up to here (tests/solvers and benchmarks)
EXHAUSTIVE_STAGES = 6  # auto asks the oracle before it calls a budget of so short a chain infeasible
SHORT_STAGES = 100  # up to here the smallest schedule takes a moment, and is known also where the time is over
LEAST_SECONDS = 1.0  # what the quick methods get at least: a shorter limit is one for ilp
INTERRUPTED_SECONDS = 1.0  # after Ctrl-C, for the baselines where nothing else is known
FRONTIER_BUDGETS = 6  # for methods that solve one budget at a time

_PROVEN = 1e-9  # relative distance from the bound that counts as none
_TIE = 1e-12  # relative difference of two sums of the same seconds
_TRUSTED = 1e-6  # a bound this far above a replayed schedule is wrong


def solver_names(*, linked: bool = True) -> tuple[str, ...]:
    """The methods that ``solve_chain`` and ``frontier`` know; ``linked=False`` leaves out those that need a link."""
    return tuple(name for name in METHODS if linked or name not in NEED_LINK)


def solve_chain(problem: Problem, solver: str = "auto", time_limit_seconds: float | None = None) -> Solution:
    """The fastest schedule that ``solver`` finds within the budget, replayed, with a bound that holds for all.

    Args:
        problem: the chain, its budget in bytes, and the link to host memory if there is one. ``auto`` and ``rotor``
            weigh what the link can carry beside recomputation; methods that know no link leave it unused.
        solver: one of ``solver_names()``; ``auto`` takes the fastest of all quick methods (of a sample of the
            baselines' candidates for more than 250 stages) and, for chains of up to 12 stages that they leave
            unproven, asks ``ilp``.
        time_limit_seconds: whatever the method, the search ends then (a limit below a second is one for ``ilp``: the
            quick methods have a second); None: no limit but for ``ilp`` (60) and the part that ``auto`` gives it (3).

    After Ctrl-C and where the time is over the solution is the best of what was found until then, or else of the
    quickest baselines; after Ctrl-C it is marked ``interrupted``.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, and no schedule within the budget was known.
        ValueError: an unknown solver, an impossible time limit, a chain too large for ``exhaustive``, or no usable link
            for a method that needs one.
    """
    _check(solver, time_limit_seconds, problem.link)
    start = time.perf_counter()
    search = _Search(problem, time_limit_seconds)
    spare: list[ReplayedSchedule] = []  # for where the method does not come to its end
    interrupted, bound = False, 0.0
    with Deadline(math.inf if time_limit_seconds is None else max(time_limit_seconds, LEAST_SECONDS)) as deadline:
        try:
            if left_seconds() < math.inf and solver not in BASELINES:
                spare += quick_schedules(problem.chain)
            bound = _bound(problem)
            search.run(solver)
            if solver == "exhaustive" and search.found and search.fastest() is None:
                search.found += rotor_schedules(problem)  # what it found is not accepted
            if search.fastest() is None:
                return _without_schedule(problem, solver, max(bound, search.bound_seconds), search.found, start)
        except KeyboardInterrupt:
            interrupted = True
    with unlimited():
        best = search.fastest()
        if best is None and interrupted:
            with Deadline(INTERRUPTED_SECONDS):
                spare += all_baseline_schedules(problem.chain)
        if best is None and solver not in BASELINES and len(problem.chain.stages) <= SHORT_STAGES:
            spare += [replayed(problem.chain, solver, schedule) for schedule in extreme_schedules(problem.chain)]
        if not bound and len(problem.chain.stages) <= SHORT_STAGES:
            bound = _bound(problem)
        best = best or _fastest(problem, spare)
        if best is None and interrupted:
            raise KeyboardInterrupt
        if best is None:
            assert deadline.passed
            return _where_time_is_over(problem, solver, bound, [*search.found, *spare], start)
    if search.bound_seconds <= best.seconds * (1 + _TRUSTED):  # else a solver's numerical error: it is refuted at hand
        bound = max(bound, search.bound_seconds)
    return replace(_solution(best, bound, time.perf_counter() - start), interrupted=interrupted)


def frontier(
    chain: Chain,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    link: Link | None = None,
    accepts: Accepts | None = None,
) -> list[Solution]:
    """Solutions that no other one of the method beats, by rising peak and falling seconds.

    Each one is the answer to its own peak as a budget. ``rotor`` and ``auto`` return at most about 100 of them (30 for
    more than 250 stages), ``ilp`` a handful, between the smallest and the unplanned peak. With a link that can carry
    something the methods that weigh it answer two dozen budgets beside. What ``accepts`` refuses is left out.
    """
    _check(solver, time_limit_seconds, link)
    start = time.perf_counter()
    if solver in ("ilp", "exhaustive", "offload_ilp"):
        problem = Problem(chain=chain, budget_bytes=0, link=link, accepts=accepts)
        return _frontier_of_budgets(problem, solver, time_limit_seconds or DEFAULT_ILP_SECONDS)
    schedules: list[ReplayedSchedule] = []
    with Deadline(time_limit_seconds or math.inf):
        _bound(Problem(chain=chain, budget_bytes=0, link=link))  # remembered: what it is made of
        _add_frontier(schedules, chain, solver)
        if link is not None and solver in USE_LINK and can_offload(chain, link):
            schedules += frontier_with_copies(chain, solver, link)
    best = undominated((each for each in schedules if accepts is None or accepts(each.schedule)), _PROVEN)
    spent = (time.perf_counter() - start) / max(1, len(best))
    problems = [Problem(chain=chain, budget_bytes=entry.peak_bytes, link=link) for entry in best]
    with unlimited():  # remembered by now, or two sweeps
        return [_solution(entry, _bound(problem), spent) for entry, problem in zip(best, problems, strict=True)]


def _check(solver: str, time_limit_seconds: float | None, link: Link | None) -> None:
    check_solver("a solver", solver, METHODS, "choose one of them; others are for graphs of ops")
    if solver in NEED_LINK and (link is None or not link.usable):
        raise ValueError(
            f"{solver}: expected a link with rates above zero and host memory, got {link!r}; give one, or choose 'auto'"
        )
    check_time_limit(time_limit_seconds)


def _bound(problem: Problem) -> float:
    """Seconds that every schedule needs, with or without copies as far as the link allows."""
    chain, link = problem.chain, problem.link
    return bound_seconds(chain, problem.budget_bytes, link if can_offload(chain, link) else None)


def _fastest(problem: Problem, schedules: Iterable[ReplayedSchedule]) -> ReplayedSchedule | None:
    """The fastest that fits; of equally fast ones that with the fewest runs and copies, so that none is for nothing."""
    fitting = [entry for entry in schedules if entry.peak_bytes <= problem.budget_bytes]
    while fitting:
        limit = min(entry.seconds for entry in fitting) * (1 + _TIE)
        ties = [entry for entry in fitting if entry.seconds <= limit]
        best = min(ties, key=lambda entry: (*_extra_work(entry.schedule), entry.peak_bytes))
        if problem.accepts is None or problem.accepts(best.schedule):
            return best
        fitting.remove(best)
    return None


def _extra_work(schedule: Schedule) -> tuple[int, int, int]:
    """Stages that run, forwards with ops inside that run again, and copies."""
    copies = sum(action.kind in TRANSFERS for action in schedule.actions)
    return schedule.forward_runs(), schedule.choices_inside(), copies


def _is_proven(seconds: float, bound: float) -> bool:
    return seconds <= bound * (1 + _PROVEN)


def _solution(entry: ReplayedSchedule, bound: float, spent_seconds: float) -> Solution:
    bound = min(bound, entry.seconds)  # the last digits of sums in another order
    return Solution(
        solver=entry.solver,
        status="optimal" if _is_proven(entry.seconds, bound) else "feasible",
        schedule=entry.schedule,
        peak_bytes=entry.peak_bytes,
        seconds=entry.seconds,
        lower_bound_seconds=bound,
        solve_seconds=spent_seconds,
    )


def _without_schedule(
    problem: Problem, solver: str, proven: float, schedules: list[ReplayedSchedule], start: float
) -> Solution:
    """The refusal with the smallest peak of the method's schedules; with shared tensors it may lie below the DP's.

    Infeasible only where no schedule at all can fit: by the bound on all, or the one that the method ``proven``.
    """
    chain = problem.chain
    fits = any(entry.peak_bytes <= problem.budget_bytes for entry in schedules)  # none that is accepted
    bound = 0.0 if fits else max(_bound(problem), proven)
    why = None if solver in (*BASELINES, *NEED_LINK) else shortage(chain)
    if can_offload(chain, problem.link) and solver in USE_LINK:
        schedules = [*schedules, smallest_with_copies(problem, solver)]
    known = [entry for entry in schedules if problem.accepts is None or problem.accepts(entry.schedule)]
    lowest = min(known, key=lambda entry: entry.peak_bytes, default=None)
    if lowest is not None and (why is None or lowest.peak_bytes < why.minimum_budget_bytes):
        why = shortage_of(chain, lowest.schedule, problem.link)
    assert why is not None
    return Solution(
        solver=solver,
        status="infeasible" if bound == math.inf else "unknown",
        # Finite, and of a larger budget where there is none of this one.
        lower_bound_seconds=max(
            0.0 if bound == math.inf else bound, _bound(replace(problem, budget_bytes=why.minimum_budget_bytes))
        ),
        solve_seconds=time.perf_counter() - start,
        shortage=why,
    )


def _where_time_is_over(
    problem: Problem, solver: str, bound: float, known: list[ReplayedSchedule], start: float
) -> Solution:
    """The smallest peak that is known until then stands for the smallest budget."""
    chain = problem.chain
    known = known or [replayed(chain, "keep_all", schedule) for schedule in keep_all(chain)]
    lowest = min(known, key=lambda entry: entry.peak_bytes)
    return Solution(
        solver=solver,
        status="infeasible" if bound == math.inf else "unknown",
        lower_bound_seconds=0.0 if bound == math.inf else bound,
        solve_seconds=time.perf_counter() - start,
        shortage=shortage_of(chain, lowest.schedule, problem.link),
    )


class _Search:
    """The best schedules and bounds for one problem; methods add both as they find them.

    Attributes:
        problem: the chain and its budget.
        time_limit_seconds: as asked for; None: the method's own.
        found: the schedules, replayed.
        bound_seconds: the largest bound that a method proved.
    """

    def __init__(self, problem: Problem, time_limit_seconds: float | None) -> None:
        self.problem, self.time_limit_seconds = problem, time_limit_seconds
        self.found: list[ReplayedSchedule] = []
        self.bound_seconds = 0.0

    def run(self, solver: str) -> None:
        """Have a method look for schedules, with copies where the link allows them."""
        problem = self.problem
        if not can_offload(problem.chain, problem.link):
            METHODS[solver](self)
            return
        if solver in USE_LINK:
            self.found += schedules_with_copies(problem, solver, self.time_limit_seconds or DEFAULT_ILP_SECONDS)
        if solver == "auto":
            best = self.fastest()
            if best is None or not _is_proven(best.seconds, _bound(problem)):
                self.found += schedules_for_slower_links(problem, math.inf if best is None else best.seconds)
        try:
            METHODS[solver](self)
        finally:
            self.bound_seconds = 0.0  # no method knows links in its proof

    def fastest(self) -> ReplayedSchedule | None:
        """The fastest that fits and is accepted."""
        return _fastest(self.problem, self.found)

    def add(self, solver: str, candidate: Candidate) -> None:
        """Take a method's one schedule, if it has one, and its bound.

        Raises:
            KeyboardInterrupt: that ended the method's search.
        """
        if candidate.schedule is not None:
            self.found.append(replayed(self.problem.chain, solver, candidate.schedule))
        if candidate.interrupted:
            raise KeyboardInterrupt
        self.bound_seconds = max(self.bound_seconds, candidate.lower_bound_seconds)


def _baseline(search: _Search, name: str) -> None:
    search.found += baseline_schedules(search.problem.chain, name)


def _keep_whole(search: _Search) -> None:
    search.found += _kept_whole(search.problem.chain)


def _kept_whole(chain: Chain) -> list[ReplayedSchedule]:
    return [replayed(chain, "offload_only", schedule) for schedule in keep_all(chain)]


def _rotor(search: _Search) -> None:
    search.found += rotor_schedules(search.problem)


def _exhaustive(search: _Search) -> None:
    search.add("exhaustive", exhaustive.solve(search.problem))


def _ilp(search: _Search) -> None:
    _find_by_program(search, search.time_limit_seconds or DEFAULT_ILP_SECONDS)


def _find_by_program(search: _Search, time_limit_seconds: float) -> None:
    """Add the program's answer; the extremes are incumbents, so that a feasible budget is never called infeasible.

    Without shared tensors the program bounds the chain with them; where its answer does not fit together with
    them, the program with all of them counted throughout gives one that does.
    """
    problem, chain = search.problem, search.problem.chain
    deadline = time.perf_counter() + time_limit_seconds
    search.found += [replayed(chain, "ilp", schedule) for schedule in extreme_schedules(chain)]
    without_shared = replace(problem, chain=replace(chain, shared=()))
    answer = ilp.solve(without_shared, time_limit_seconds / 2 if chain.shared else time_limit_seconds)
    search.add("ilp", answer)
    fits = answer.schedule is not None and search.found[-1].peak_bytes <= problem.budget_bytes
    if chain.shared and answer.lower_bound_seconds < math.inf and not fits:
        folded = ilp.solve(replace(problem, chain=chain.folded()), max(0.1, deadline - time.perf_counter()))
        search.add("ilp", replace(folded, lower_bound_seconds=0.0))  # of less than all schedules


def _auto(search: _Search) -> None:
    start, problem, chain = time.perf_counter(), search.problem, search.problem.chain
    search.found += all_baseline_schedules(chain)
    search.found += rotor_schedules(problem)
    best, bound = search.fastest(), bound_seconds(chain, problem.budget_bytes)
    is_open = bound < math.inf if best is None else not _is_proven(best.seconds, bound)
    limit = AUTO_ILP_SECONDS
    if search.time_limit_seconds is not None:
        limit = search.time_limit_seconds - (time.perf_counter() - start)
    if not is_open or limit <= 0 or len(chain.stages) > AUTO_ILP_STAGES:
        return
    _find_by_program(search, limit)
    if len(chain.stages) <= EXHAUSTIVE_STAGES and search.fastest() is None:
        search.found.clear()  # schedules of no other method's class
        search.bound_seconds = 0.0
        _exhaustive(search)


ChainMethod = Callable[[_Search], None]

METHODS: dict[str, ChainMethod] = {
    **{name: partial(_baseline, name=name) for name in BASELINES},
    "rotor": _rotor,
    "ilp": _ilp,
    "exhaustive": _exhaustive,
    "offload_only": _keep_whole,
    "pofo": _rotor,
    "offload_ilp": _rotor,
    "auto": _auto,
}


def _add_frontier(found: list[ReplayedSchedule], chain: Chain, solver: str) -> None:
    """Add all schedules of a method, without copies, that the frontier is chosen from."""
    if solver in BASELINES:
        found += baseline_schedules(chain, solver)
    elif solver == "offload_only":
        found += _kept_whole(chain)
    else:
        if solver == "auto":
            found += all_baseline_schedules(chain)
        found += rotor_points(chain) if left_seconds() < math.inf else rotor_frontier(chain)


def _frontier_of_budgets(problem: Problem, solver: str, time_limit_seconds: float) -> list[Solution]:
    budgets = even_budgets(problem.chain, shortage(problem.chain).minimum_budget_bytes, FRONTIER_BUDGETS)
    share = time_limit_seconds / len(budgets)
    solutions: list[Solution] = []
    for budget_bytes in budgets:
        solutions.append(solve_chain(replace(problem, budget_bytes=budget_bytes), solver, share))
        if solutions[-1].interrupted:
            break
    return undominated((solution for solution in solutions if solution.schedule is not None), _PROVEN)
