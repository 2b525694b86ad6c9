"""The graph methods by name: from a problem to a replayed, certified solution, and from a graph to a frontier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, takewhile

import numpy as np

from solvers.chain import rotor
from solvers.graph import exhaustive, hierarchy, moments, order_merging, quick_orders
from solvers.graph.lower_bound import graph_bound_seconds, smallest_working_set
from solvers.graph.orders import SMALLEST_GAP, Incumbent, IndexedGraph, fits, peak_profile, schedule_of, seconds_of
from solvers.problem.deadline import Deadline, check_deadline
from solvers.problem.graph import Graph
from solvers.problem.plain_data import check_budget, check_time_limit
from solvers.problem.simulator import replay
from solvers.problem.solution import Shortage, Solution, check_solver, undominated

EXHAUSTIVE_NODES = 10  # auto asks the exact oracle up to here: milliseconds (tests/solvers/graph/test_registry.py)
DEFAULT_SECONDS = 60.0
LARGE_NODES, LARGE_SECONDS = 500, 25.0  # without a time limit of the user's, larger graphs get less: plans, not proofs
DEFAULT_GAP = 1e-3  # within it a plan counts as good enough to stop

_TRUSTED = 1e-6  # a bound this far above a replayed schedule is wrong
_REPAIRED = 3  # orders made on demand that are repaired: the fastest that fit
_NOISE = 0.4  # standard deviation of the logarithm of the factors on the scores
_START_SHARE = 0.9  # of the time has to be left for further first orders
_ROUND_SHARE = 0.35  # of the time that is left, for one round of the moments program
_IDLE_MOVES = 200  # of the local search, without a better order: it ends, though there is time
_FRONTIER_BUDGETS = 7
_SHRINK_ROUNDS, _SHRINK_SECONDS = 4, 2.0  # of the moments program for one budget, and of each round
_STEPS_DOWN, _FIRST_STEP = 12, 0.25  # towards a smaller peak; the first as a share of the range down to the largest op
_MERGES = 3  # of the orders seen, after each of these steps

GraphMethod = Callable[[Incumbent], None]


def _keep_all(incumbent: Incumbent) -> None:
    incumbent.offer(range(incumbent.indexed.count), "keep_all")


def _demand(incumbent: Incumbent) -> None:
    """The fastest orders made on demand that fit, repaired."""
    indexed = incumbent.indexed
    fitting: list[list[int]] = []
    for order in takewhile(lambda _: not incumbent.done, quick_orders.orders_on_demand(indexed, indexed.rerunnable)):
        incumbent.note(order, "demand")
        if fits(indexed, order, incumbent.budget_bytes):
            fitting.append(order)
    for order in sorted(fitting, key=partial(seconds_of, indexed))[:_REPAIRED]:
        incumbent.offer(order, "demand")


def _eviction(incumbent: Incumbent) -> None:
    """One order per power of the score, then orders with noise for the rest of the time."""
    evictions = _evictions(incumbent)
    while not incumbent.done:
        next(evictions)


def _evictions(incumbent: Incumbent) -> Iterator[None]:
    """Endless trials: the published score, its other powers, then all of them with noise."""
    indexed = incumbent.indexed
    rng, noise = np.random.default_rng(0), np.ones(indexed.count)
    for trial in count():
        power = quick_orders.POWERS[trial % len(quick_orders.POWERS)]
        order = quick_orders.eviction_order(indexed, incumbent.budget_bytes, indexed.rerunnable, power, noise)
        if order is not None:
            incumbent.offer(order, "eviction")
        yield
        if trial + 1 >= len(quick_orders.POWERS):
            noise = rng.lognormal(sigma=_NOISE, size=indexed.count)


def _moments(incumbent: Incumbent) -> None:
    moment_rounds = moments.MomentSearch(incumbent)
    while not incumbent.done and not moment_rounds.finished:
        moment_rounds.step(incumbent.left_seconds)


def _auto(incumbent: Incumbent) -> None:
    """Quick orders first, then in turn rounds of the moments program, and as long as they took, of the search."""
    _keep_all(incumbent)
    if incumbent.done:
        return
    if incumbent.indexed.count <= EXHAUSTIVE_NODES:
        _exhaustive(incumbent)
        return
    _demand(incumbent)
    evictions = _evictions(incumbent)
    enough_seconds = _START_SHARE * incumbent.left_seconds
    for _ in quick_orders.POWERS:
        if incumbent.order is None or incumbent.left_seconds > enough_seconds:
            next(evictions)
    local_moves = _moves(incumbent, evictions)
    moment_rounds = moments.MomentSearch(incumbent)
    moment_rounds.step(_ROUND_SHARE * incumbent.left_seconds)
    if not incumbent.done:
        hierarchy.solve(incumbent, rotor.Table)
    if incumbent.order is None:
        _shrink(incumbent)
    moving = True
    while not incumbent.done and (moving or not moment_rounds.finished):
        before_seconds = incumbent.left_seconds
        if not moment_rounds.finished:
            moment_rounds.step(_ROUND_SHARE * before_seconds)
        after_seconds = incumbent.left_seconds
        until_seconds = 0.0 if moment_rounds.finished else after_seconds - (before_seconds - after_seconds)
        while moving and not incumbent.done and incumbent.left_seconds > until_seconds:
            moving = next(local_moves, False)


def _moves(incumbent: Incumbent, evictions: Iterator[None]) -> Iterator[bool]:
    """Make a fresh order, merge orders, solve a window again; without one that fits, merge towards a smaller peak.

    True after each of these moves; it ends after ``_IDLE_MOVES`` of them in a row that found nothing better.
    """
    merging, shrinking = (order_merging.OrderMerging(incumbent, smallest_peak=peak) for peak in (False, True))
    neighbourhood = moments.NeighbourhoodSearch(incumbent)
    improving = [merging.step, merging.step, neighbourhood.step]
    idle_moves = 0
    while True:
        for move in [partial(next, evictions), *([shrinking.step] if incumbent.order is None else improving)]:
            known = incumbent.seconds, incumbent.smallest_bytes
            move()
            idle_moves = idle_moves + 1 if (incumbent.seconds, incumbent.smallest_bytes) == known else 0
            if idle_moves == _IDLE_MOVES:
                return
            yield True


def _hierarchy(incumbent: Incumbent) -> None:
    """Blocks, menus and the chain table, then local search from there."""
    _keep_all(incumbent)
    if not incumbent.done:
        hierarchy.solve(incumbent, rotor.Table)
    local_moves = _moves(incumbent, _evictions(incumbent))
    while not incumbent.done and next(local_moves, False):
        pass


def _exhaustive(incumbent: Incumbent) -> None:
    order = exhaustive.solve(incumbent.indexed, incumbent.budget_bytes)
    incumbent.offer_bound(math.inf if order is None else seconds_of(incumbent.indexed, order))
    if order is not None:
        incumbent.offer(order, "exhaustive", repair=False)


METHODS: dict[str, GraphMethod] = {
    "keep_all": _keep_all,
    "demand": _demand,
    "eviction": _eviction,
    "hierarchy": _hierarchy,
    "moments": _moments,
    "exhaustive": _exhaustive,
    "auto": _auto,
}


def graph_solver_names() -> tuple[str, ...]:
    """The methods that ``solve_graph`` and ``graph_frontier`` know."""
    return tuple(METHODS)


def solve_graph(
    graph: Graph,
    budget_bytes: int,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    gap: float = DEFAULT_GAP,
) -> Solution:
    """The fastest schedule that ``solver`` finds within the budget, replayed, with a bound that holds for all.

    Args:
        graph: the problem.
        budget_bytes: the most that may be alive at once.
        solver: one of ``graph_solver_names()``; ``auto`` takes the best of all quick methods and searches on.
        time_limit_seconds: the search ends then; None: 60, or 25 above 500 nodes.
        gap: relative distance from the bound at which a search ends early.

    Returns:
        The solution; after Ctrl-C the best one until then, marked ``interrupted``.

    Raises:
        ValueError: an unknown solver, an impossible time limit or gap, or a graph too large for the solver.
    """
    _check(solver, time_limit_seconds, gap)
    check_budget(budget_bytes)
    start, indexed = time.perf_counter(), IndexedGraph(graph)
    limit = time_limit_seconds or (LARGE_SECONDS if indexed.count > LARGE_NODES else DEFAULT_SECONDS)
    incumbent = Incumbent(indexed, budget_bytes, gap=gap)
    interrupted = False
    with Deadline(limit):
        try:
            incumbent.offer_bound(graph_bound_seconds(indexed, budget_bytes))
            if incumbent.bound_seconds < math.inf:
                METHODS[solver](incumbent)
            if incumbent.order is None and (solver == "auto" or incumbent.bound_seconds == math.inf):
                _find_smallest(incumbent)
        except KeyboardInterrupt:
            interrupted = True
    if incumbent.order is None:
        return _without_schedule(incumbent, solver, time.perf_counter() - start, interrupted)
    return _solution(incumbent, time.perf_counter() - start, interrupted)


def graph_frontier(
    graph: Graph, solver: str = "auto", time_limit_seconds: float | None = None, gap: float = DEFAULT_GAP
) -> list[Solution]:
    """Solutions at a handful of budgets between the smallest known feasible one and the unplanned peak.

    Those that another one beats are left out; each is the answer to its own peak as a budget. The time limit is
    shared by the budgets.
    """
    _check(solver, time_limit_seconds, gap)
    indexed = IndexedGraph(graph)
    smallest = Incumbent(indexed, 0, gap=gap)
    solutions: list[Solution] = []
    with Deadline(time_limit_seconds or DEFAULT_SECONDS) as deadline:
        share_seconds = deadline.left_seconds() / (_FRONTIER_BUDGETS + 1)
        with Deadline(share_seconds):
            _find_smallest(smallest)
        low = smallest.smallest_bytes
        high = max(low, int(peak_profile(indexed, range(indexed.count)).max()))
        for share in np.linspace(0.0, 1.0, _FRONTIER_BUDGETS) ** 2:  # closer where curves are steep
            check_deadline()
            budget = low + round(float(share) * (high - low))
            limit = deadline.left_seconds() / (_FRONTIER_BUDGETS - len(solutions))
            solutions.append(solve_graph(graph, budget, solver, limit, gap))
            if solutions[-1].interrupted:
                break
    return undominated([solution for solution in solutions if solution.schedule is not None])


def _check(solver: str, time_limit_seconds: float | None, gap: float) -> None:
    check_solver("a solver of graphs", solver, METHODS)
    check_time_limit(time_limit_seconds)
    if not 0 <= gap < 1:
        raise ValueError(f"a gap: expected a share from 0 to below 1, got {gap!r}; leave it out for the default")


def _solution(incumbent: Incumbent, spent_seconds: float, interrupted: bool) -> Solution:
    assert incumbent.order is not None
    schedule = schedule_of(incumbent.indexed, incumbent.order)
    replayed = replay(incumbent.indexed.graph, schedule)
    assert replayed.peak_bytes <= incumbent.budget_bytes
    bound = incumbent.bound_seconds
    if bound > replayed.seconds * (1 + _TRUSTED):  # a schedule at hand refutes it
        bound = graph_bound_seconds(incumbent.indexed, incumbent.budget_bytes)
    bound = min(bound, replayed.seconds)
    return Solution(
        solver=incumbent.solver,
        status="optimal" if replayed.seconds - bound <= SMALLEST_GAP * replayed.seconds else "feasible",
        schedule=schedule,
        peak_bytes=replayed.peak_bytes,
        seconds=replayed.seconds,
        lower_bound_seconds=bound,
        solve_seconds=spent_seconds,
        interrupted=interrupted,
    )


def _without_schedule(incumbent: Incumbent, solver: str, spent_seconds: float, interrupted: bool) -> Solution:
    smallest = incumbent.smallest
    proven = incumbent.bound_seconds == math.inf
    minimum, node = incumbent.smallest_bytes, smallest[int(peak_profile(incumbent.indexed, smallest).argmax())]
    bound = graph_bound_seconds(incumbent.indexed, minimum) if proven else incumbent.bound_seconds
    return Solution(
        solver=solver,
        status="infeasible" if proven else "unknown",
        lower_bound_seconds=bound,
        solve_seconds=spent_seconds,
        shortage=Shortage(minimum_budget_bytes=minimum, stage=incumbent.indexed.graph.nodes[node].name, moment="run"),
        interrupted=interrupted,
    )


def _find_smallest(incumbent: Incumbent) -> None:
    """Note the order with the smallest peak that is found; of tiny graphs the smallest there is."""
    if incumbent.indexed.count <= EXHAUSTIVE_NODES:
        order = exhaustive.solve(incumbent.indexed, exhaustive.smallest_peak(incumbent.indexed))
        assert order is not None
        incumbent.note(order, "exhaustive")
        return
    for order in quick_orders.orders_on_demand(incumbent.indexed, incumbent.indexed.rerunnable):
        incumbent.note(order, "demand")
    _shrink(incumbent)


def _shrink(incumbent: Incumbent) -> None:
    """Note orders with ever smaller peaks: a step below the smallest known one, wider after a success.

    What is tried depends on the graph alone, so that the smallest budget that is told can be solved for again.
    """
    merging = order_merging.OrderMerging(incumbent, smallest_peak=True)
    low_bytes, share = smallest_working_set(incumbent.indexed)[0], _FIRST_STEP
    for _ in range(_STEPS_DOWN):
        range_bytes = incumbent.smallest_bytes - low_bytes
        if range_bytes <= 0:
            return
        step_bytes = max(1, round(share * range_bytes))
        inner = Incumbent(incumbent.indexed, incumbent.smallest_bytes - step_bytes, gap=1.0)  # any that fits will do
        inner.seen = incumbent.seen
        _find_any(inner)
        share = share / 2 if inner.order is None else min(0.5, 1.5 * share)
        incumbent.note(inner.smallest, inner.solver)
        for _ in range(_MERGES):
            merging.step()
    incumbent.offer(incumbent.smallest, incumbent.solver or "eviction")


def _find_any(incumbent: Incumbent) -> None:
    """Look for an order that fits: by eviction, and by rounds of the moments program."""
    evictions = _evictions(incumbent)
    for _ in quick_orders.POWERS:
        if incumbent.order is None:
            next(evictions)
    search = moments.MomentSearch(incumbent)
    for _ in range(_SHRINK_ROUNDS):
        if incumbent.order is None and not search.finished:
            search.step(_SHRINK_SECONDS)
