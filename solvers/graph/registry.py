"""The menu of graph methods: one call from a problem to a replayed, certified solution, and one to a frontier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count, takewhile

import numpy as np

from solvers.arrays import Mask
from solvers.chain.rotor import Table
from solvers.graph import checkmate, exhaustive, hierarchy, intervals, lower_sets
from solvers.graph.eviction import POWERS, eviction_order
from solvers.graph.incumbent import SMALLEST_GAP, Incumbent
from solvers.graph.liveness import IndexedGraph, peak_profile, schedule_of, seconds_of
from solvers.graph.lower_bound import graph_bound_seconds, smallest_working_set
from solvers.graph.moments import MomentSearch, rerunnable_nodes
from solvers.graph.neighbourhood_search import NeighbourhoodSearch
from solvers.graph.on_demand import demand_orders
from solvers.graph.order_merging import OrderMerging
from solvers.problem.graph import Graph
from solvers.problem.graph_schedule import GraphSchedule
from solvers.problem.graph_simulator import replay_graph
from solvers.problem.number_checks import check_time_limit
from solvers.problem.solution import GraphCandidate, GraphProblem, Shortage, Solution

GraphSolution = Solution[GraphSchedule]

EXHAUSTIVE_NODES = 10  # auto asks the exact oracle up to here: milliseconds (tests/solvers/graph/test_registry.py)
DEFAULT_SECONDS = 60.0
LARGE_NODES, LARGE_SECONDS = 500, 25.0  # without a time limit of the user's, larger graphs get less: plans, not proofs
DEFAULT_GAP = 1e-3  # within it a plan counts as good enough to stop

_TRUSTED = 1e-6  # a bound this far above a replayed schedule is wrong
_TIDIED = 3  # orders made on demand that are tidied: the fastest that fit
_NOISE = 0.4  # standard deviation of the logarithm of the factors on the scores
_START_SHARE = 0.9  # of the time has to be left for further first orders
_ROUND_SHARE = 0.35  # of the time that is left, for one round of the moments program
_FRONTIER_BUDGETS = 7
_HALVINGS = 8  # of the range between the largest op and the smallest known budget: to half a percent of it

Method = Callable[[Incumbent, Mask], None]


def _keep_all(search: Incumbent, _: Mask) -> None:
    search.offer(range(search.indexed.count), "keep_all")


def _demand(search: Incumbent, rerunnable: Mask) -> None:
    """The fastest orders made on demand that fit, tidied."""
    indexed = search.indexed
    orders = takewhile(lambda _: not search.done, demand_orders(indexed, rerunnable))
    fitting = [order for order in orders if int(peak_profile(indexed, order).max()) <= search.budget_bytes]
    for order in sorted(fitting, key=partial(seconds_of, indexed))[:_TIDIED]:
        search.offer(order, "demand")


def _eviction(search: Incumbent, rerunnable: Mask) -> None:
    """One order per power of the score, then orders with noise for the rest of the time."""
    trials = _evictions(search, rerunnable)
    while not search.done:
        next(trials)


def _evictions(search: Incumbent, rerunnable: Mask) -> Iterator[None]:
    """Endless trials: the published score, its other powers, then all of them with noise."""
    rng, noise = np.random.default_rng(0), np.ones(search.indexed.count)
    for trial in count():
        power = POWERS[trial % len(POWERS)]
        order = eviction_order(search.indexed, search.budget_bytes, rerunnable, power, noise)
        if order is not None:
            search.offer(order, "eviction")
        yield
        if trial + 1 >= len(POWERS):
            noise = rng.lognormal(sigma=_NOISE, size=search.indexed.count)


def _moments(search: Incumbent, rerunnable: Mask) -> None:
    rounds = MomentSearch(search, rerunnable.copy())
    while not search.done and not rounds.finished:
        rounds.step(search.left_seconds)


def _auto(search: Incumbent, rerunnable: Mask) -> None:
    """Quick orders first, then in turn rounds of the moments program, and as long as they took, of the search."""
    _keep_all(search, rerunnable)
    if search.done:
        return
    if search.indexed.count <= EXHAUSTIVE_NODES:
        METHODS["exhaustive"](search, rerunnable)
        return
    _demand(search, rerunnable)
    trials = _evictions(search, rerunnable)
    enough = _START_SHARE * search.left_seconds
    for _ in POWERS:
        if search.order is None or search.left_seconds > enough:
            next(trials)
    rounds, moves = MomentSearch(search, rerunnable.copy()), _moves(search, rerunnable, trials)
    rounds.step(_ROUND_SHARE * search.left_seconds)
    if not search.done:
        hierarchy.solve(search, rerunnable, Table)
    while not search.done:
        before = search.left_seconds
        if not rounds.finished:
            rounds.step(_ROUND_SHARE * before)
        after = search.left_seconds
        until = 0.0 if rounds.finished else after - (before - after)
        while not search.done and search.left_seconds > until:
            next(moves)


def _moves(search: Incumbent, rerunnable: Mask, trials: Iterator[None]) -> Iterator[None]:
    """Endless improvement: merge orders, make a fresh one, solve a window again."""
    merging, improvement = OrderMerging(search), NeighbourhoodSearch(search, rerunnable)
    while True:
        next(trials)
        yield
        for step in (merging.step, merging.step, improvement.step):
            if search.order is not None:
                step()
                yield


def _hierarchy(search: Incumbent, rerunnable: Mask) -> None:
    """Blocks, menus and the chain table, then local search from there."""
    _keep_all(search, rerunnable)
    if not search.done:
        hierarchy.solve(search, rerunnable, Table)
    moves = _moves(search, rerunnable, _evictions(search, rerunnable))
    while not search.done:
        next(moves)


def _candidate(solve: Callable[..., GraphCandidate], name: str) -> Method:
    """A method that answers once."""

    def run(search: Incumbent, _: Mask) -> None:
        timed = {} if solve is exhaustive.solve else {"time_limit_seconds": search.left_seconds}
        candidate = solve(search.indexed, search.budget_bytes, **timed)
        search.offer_bound(candidate.lower_bound_seconds)
        if candidate.order is not None:
            search.offer(candidate.order, name, tidy=False)

    return run


METHODS: dict[str, Method] = {
    "keep_all": _keep_all,
    "demand": _demand,
    "eviction": _eviction,
    "hierarchy": _hierarchy,
    "lower_sets": _candidate(lower_sets.solve, "lower_sets"),
    "lower_sets_exact": _candidate(partial(lower_sets.solve, exact=True), "lower_sets_exact"),
    "checkmate": _candidate(checkmate.solve, "checkmate"),
    "checkmate_rounding": _candidate(checkmate.round_relaxation, "checkmate_rounding"),
    "intervals": _candidate(intervals.solve, "intervals"),
    "moments": _moments,
    "exhaustive": _candidate(exhaustive.solve, "exhaustive"),
    "auto": _auto,
}


def graph_solver_names() -> tuple[str, ...]:
    """The methods that ``solve_graph`` and ``graph_frontier`` know."""
    return tuple(METHODS)


def solve_graph(
    problem: GraphProblem,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    gap: float = DEFAULT_GAP,
) -> GraphSolution:
    """The fastest schedule that ``solver`` finds within the budget, replayed, with a bound that holds for all.

    Args:
        problem: the graph and its budget in bytes.
        solver: one of ``graph_solver_names()``; ``auto`` takes the best of all quick methods and searches on.
        time_limit_seconds: the search ends then; None: 60, or 25 above 500 nodes.
        gap: relative distance from the bound at which a search ends early.

    Returns:
        The solution; after Ctrl-C the best one until then, marked ``interrupted``.

    Raises:
        ValueError: an unknown solver, an impossible time limit or gap, or a graph too large for the solver.
    """
    _check(solver, time_limit_seconds, gap)
    start, indexed = time.perf_counter(), IndexedGraph(problem.graph)
    limit = time_limit_seconds or (LARGE_SECONDS if indexed.count > LARGE_NODES else DEFAULT_SECONDS)
    search = Incumbent(indexed, problem.budget_bytes, time_limit_seconds=limit, gap=gap)
    interrupted = False
    try:
        search.offer_bound(graph_bound_seconds(indexed, problem.budget_bytes))
        if search.bound_seconds < math.inf:
            METHODS[solver](search, rerunnable_nodes(indexed))
    except KeyboardInterrupt:
        interrupted = True
    return _solution(search, solver, time.perf_counter() - start, interrupted)


def graph_frontier(
    graph: Graph, solver: str = "auto", time_limit_seconds: float | None = None, gap: float = DEFAULT_GAP
) -> list[GraphSolution]:
    """Solutions at a handful of budgets between the smallest known feasible one and the unplanned peak.

    Those that another one beats are left out; each is the answer to its own peak as a budget. The time limit is
    shared by the budgets.
    """
    _check(solver, time_limit_seconds, gap)
    indexed = IndexedGraph(graph)
    low = int(peak_profile(indexed, _smallest_known(graph)).max())
    high = max(low, int(peak_profile(indexed, range(indexed.count)).max()))
    limit = (time_limit_seconds or DEFAULT_SECONDS) / _FRONTIER_BUDGETS
    found: list[GraphSolution] = []
    for share in np.linspace(0.0, 1.0, _FRONTIER_BUDGETS) ** 2:  # closer where curves are steep
        budget = low + round(float(share) * (high - low))
        found.append(solve_graph(GraphProblem(graph=graph, budget_bytes=budget), solver, limit, gap))
        if found[-1].interrupted:
            break
    return _undominated([solution for solution in found if solution.schedule is not None])


def _undominated(solutions: Sequence[GraphSolution]) -> list[GraphSolution]:
    best: list[GraphSolution] = []
    for solution in sorted(solutions, key=lambda s: (s.peak_bytes or 0, s.seconds or 0.0)):
        if not best or (solution.seconds or 0.0) < (best[-1].seconds or 0.0):
            best.append(solution)
    return best


def _check(solver: str, time_limit_seconds: float | None, gap: float) -> None:
    if solver not in METHODS:
        raise ValueError(
            f"a solver of graphs: expected one of {', '.join(METHODS)}, got {solver!r}; choose one of them"
        )
    check_time_limit(time_limit_seconds)
    if not 0 <= gap < 1:
        raise ValueError(f"a gap: expected a share from 0 to below 1, got {gap!r}; leave it out for the default")


def _solution(search: Incumbent, solver: str, spent_seconds: float, interrupted: bool) -> GraphSolution:
    if search.order is None and solver == "auto" and search.bound_seconds < math.inf:
        search.offer(_smallest_known(search.indexed.graph), "eviction")
    if search.order is None:
        return _without_schedule(search, solver, spent_seconds, interrupted)
    schedule = schedule_of(search.indexed, search.order)
    replayed = replay_graph(search.indexed.graph, schedule)
    assert replayed.peak_bytes <= search.budget_bytes
    bound = search.bound_seconds
    if bound > replayed.seconds * (1 + _TRUSTED):  # a schedule at hand refutes it
        bound = graph_bound_seconds(search.indexed, search.budget_bytes)
    bound = min(bound, replayed.seconds)
    return Solution(
        solver=search.solver,
        status="optimal" if replayed.seconds - bound <= SMALLEST_GAP * replayed.seconds else "feasible",
        schedule=schedule,
        peak_bytes=replayed.peak_bytes,
        seconds=replayed.seconds,
        lower_bound_seconds=bound,
        solve_seconds=spent_seconds,
        interrupted=interrupted,
    )


def _without_schedule(search: Incumbent, solver: str, spent_seconds: float, interrupted: bool) -> GraphSolution:
    profile = peak_profile(search.indexed, known := _smallest_known(search.indexed.graph))
    proven = search.bound_seconds == math.inf
    minimum, node = int(profile.max()), known[int(profile.argmax())]
    bound = graph_bound_seconds(search.indexed, minimum) if proven else search.bound_seconds
    return Solution(
        solver=solver,
        status="infeasible" if proven else "unknown",
        lower_bound_seconds=bound,
        solve_seconds=spent_seconds,
        shortage=Shortage(minimum_budget_bytes=minimum, stage=search.indexed.graph.nodes[node].name, moment="run"),
        interrupted=interrupted,
    )


@lru_cache(maxsize=4)
def _smallest_known(graph: Graph) -> tuple[int, ...]:
    """The order with the smallest peak that is known; of tiny graphs the smallest there is."""
    indexed = IndexedGraph(graph)
    if indexed.count <= EXHAUSTIVE_NODES:
        order = exhaustive.solve(indexed, exhaustive.smallest_peak(indexed)).order
        assert order is not None
        return order
    rerunnable = rerunnable_nodes(indexed)
    orders = [list(range(indexed.count)), *demand_orders(indexed, rerunnable)]
    orders += _smaller_evictions(indexed, rerunnable, min(int(peak_profile(indexed, o).max()) for o in orders))
    return tuple(min(orders, key=lambda order: int(peak_profile(indexed, order).max())))


def _smaller_evictions(indexed: IndexedGraph, rerunnable: Mask, known: int) -> Iterator[list[int]]:
    """Orders by eviction within ever smaller budgets, by bisection below a known one."""
    low = smallest_working_set(indexed)[0]
    for _ in range(_HALVINGS):
        if low >= known:
            return
        budget = (low + known) // 2
        found = (eviction_order(indexed, budget, rerunnable, power) for power in POWERS)
        order = next((order for order in found if order is not None), None)
        if order is None:
            low = budget + 1
        else:
            known = int(peak_profile(indexed, order).max())
            yield order
