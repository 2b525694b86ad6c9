"""The memory/time frontier of every solver for one profile, chain or graph, as a table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from planner.plans.call_programs import chain_with_any_programs
from planner.plans.cost_model import chain_of
from planner.plans.offload_request import Offload, OffloadMode, offload_from, usable_link
from planner.plans.sources import Source, given_profile, read_source
from planner.plans.stage_decisions import accepted_by
from profiler.records import Profile
from solvers import Chain, Solution, frontier as solver_frontier
from solvers.chain.baselines import keep_all_replay
from solvers.chain.lower_bound import bound_seconds
from solvers.graph.lower_bound import graph_bound_seconds, smallest_working_set
from solvers.graph.orders import IndexedGraph, unplanned_replay
from solvers.graph.registry import graph_frontier
from solvers.problem.chain import Link
from solvers.problem.graph import Graph

if TYPE_CHECKING:
    import pandas as pd

CHAIN_SOLVERS = ("keep_all", "recompute_all", "chen_sqrt", "chen_greedy", "revolve", "rotor", "auto")
LINK_SOLVERS = ("offload_only", "auto")  # over a link beside those; alone where nothing else is to be drawn
GRAPH_SOLVERS = ("auto", "hierarchy", "demand", "moments")  # by rank
GRAPH_SECONDS = 45.0  # for all methods of a graph together: the whole command then takes about a minute
_SHARES = {"auto": 4, "moments": 2}  # of the time; the others mostly need less than one share
BOUND_POINTS = 40
_PROVEN = 1e-9  # relative distance from the bound that counts as none, as for solutions


class CurveRow(NamedTuple):
    """One point of a curve; see ``pareto``."""

    solver: str
    budget_bytes: int
    peak_bytes: int | None
    seconds: float
    lower_bound_seconds: float
    status: str
    solve_seconds: float = 0.0


COLUMNS = CurveRow._fields


def pareto(
    problem: Source | str | Path,
    *,
    solvers: Sequence[str] | None = None,
    time_limit_seconds: float | None = None,
    offload: Offload | OffloadMode = "auto",
) -> pd.DataFrame:
    """Return every solver's curve of memory against time.

    Args:
        problem: a Profile, a Chain, a Graph, or the path of its file.
        solvers: the solvers to include; None for the fast ones. ``ilp`` solves a handful of budgets one by one.
        time_limit_seconds: for methods that search; all methods of a graph share it (45 where None).
        offload: as for ``solve``. Over a link ``auto``, ``rotor`` and ``pofo`` weigh copies and recomputation together,
            and the curve of ``offload_only`` joins those of the methods that recompute alone. All bounds count copies.

    Returns:
        One row per point. Columns: ``solver``, ``budget_bytes`` (the smallest
        budget that the point answers), ``peak_bytes``, ``seconds`` (of the whole step),
        ``lower_bound_seconds``, ``status``, ``solve_seconds``. The rows of
        ``lower_bound`` have no peak: no plan of these stages (no schedule of a graph) within that
        budget is faster; none at all fits below a graph's first one. The row ``none`` is the unplanned
        model, its status ``computed`` where it was never run as a whole. ``attrs["left_out"]`` names methods of a
        graph that came to no turn for want of time.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, also where a method has an answer until then.
    """
    if isinstance(problem, str | Path):
        source = read_source(problem)
    else:
        source = problem if isinstance(problem, Chain | Graph) else given_profile(problem, "pareto")
    if isinstance(source, Graph):
        return _graph_curves(source, solvers, time_limit_seconds)
    profiled = isinstance(source, Profile)
    chain, record = (chain_of(source), source.link) if profiled else (source, None)
    accepts = accepted_by(source) if profiled else None
    offload_request = offload_from(offload)
    link, why = usable_link(offload_request, chain, record)
    if isinstance(source, Profile):
        status = "computed" if source.frugal else "optimal"
        unplanned = _unplanned(source.unplanned_peak_bytes, source.unplanned_seconds, status)
    else:
        unplanned = _kept_whole(chain, link)
    seconds_outside_chain = unplanned.seconds - chain.unplanned_seconds
    any_programs = chain
    if isinstance(source, Profile):
        any_programs = chain_with_any_programs(chain, [stage.menu for stage in source.stages], source.menus)

    def bound(budget_bytes: int) -> float:
        return bound_seconds(any_programs, budget_bytes, link) + seconds_outside_chain

    rows = [unplanned]
    chain_solvers = () if offload_request.mode == "only" else CHAIN_SOLVERS
    for name in solvers or dict.fromkeys((*chain_solvers, *(LINK_SOLVERS if link else ()))):
        solutions = solver_frontier(chain, name, time_limit_seconds, link, accepts)
        rows += [_row(solution, name, outside_seconds=seconds_outside_chain) for solution in _complete(solutions)]
    if any_programs is not chain:
        rows[1:] = [_with_bound(row, bound(row.budget_bytes)) for row in rows[1:]]
    peaks = [row.budget_bytes for row in rows]
    budgets = _evenly_spaced(min(peaks), max(peaks))
    rows += _bound_rows(budgets, bound)
    return _table(rows, no_offload=why)


def _graph_curves(graph: Graph, solvers: Sequence[str] | None, time_limit_seconds: float | None) -> pd.DataFrame:
    whole = unplanned_replay(graph)
    solutions, left_out = _solved_in_turn(graph, solvers, time_limit_seconds)
    rows = [_unplanned(whole.peak_bytes, whole.seconds), *(_row(solution, name) for name, solution in solutions)]
    proven = [(row.budget_bytes, row.lower_bound_seconds) for row in rows]
    return _table([*rows, *_graph_bound_rows(graph, proven, rows)], left_out=left_out)


def _solved_in_turn(
    graph: Graph, solvers: Sequence[str] | None, time_limit_seconds: float | None
) -> tuple[list[tuple[str, Solution]], list[str]]:
    names = list(solvers or GRAPH_SOLVERS)
    limit_seconds = GRAPH_SECONDS if time_limit_seconds is None else time_limit_seconds
    if not limit_seconds > 0:
        raise ValueError(
            f"a time limit: expected seconds above zero, got {limit_seconds!r}; leave it out for {GRAPH_SECONDS:g}"
        )
    return _graph_solutions(graph, names, limit_seconds)


def _table(rows: list[CurveRow], **attributes: Any) -> pd.DataFrame:
    import pandas as pd  # Half a second, which reading and solving do without.

    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table.attrs.update(attributes)
    return table


def _graph_solutions(
    graph: Graph, names: list[str], time_limit_seconds: float
) -> tuple[list[tuple[str, Solution]], list[str]]:
    """Every method's solutions, and the methods that came to no turn."""
    deadline = time.perf_counter() + time_limit_seconds
    solutions: list[tuple[str, Solution]] = []
    for k, name in enumerate(names):
        seconds_left = deadline - time.perf_counter()
        if seconds_left <= 0:
            return solutions, names[k:]
        share = _SHARES.get(name, 1) / sum(_SHARES.get(other, 1) for other in names[k:])
        solutions += [(name, solution) for solution in _complete(graph_frontier(graph, name, seconds_left * share))]
    return solutions, []


def _complete(solutions: list[Solution]) -> list[Solution]:
    """A method's solutions, where Ctrl-C did not end it."""
    if any(solution.interrupted for solution in solutions):
        raise KeyboardInterrupt
    return solutions


def _graph_bound_rows(graph: Graph, proven: Sequence[tuple[int, float]], rows: Sequence[CurveRow]) -> list[CurveRow]:
    """The quick bound over the budgets, lifted to what the solutions proved: a bound holds for smaller budgets too.

    Args:
        graph: the problem.
        proven: budgets of the graph, and seconds that no schedule within them is faster than.
        rows: over whose budgets the bound goes.
    """
    indexed = IndexedGraph(graph)
    least_bytes = smallest_working_set(indexed)[0]
    ends = [row.budget_bytes for row in rows]
    places = (budget for budget in (*ends, *(peak for peak, _ in proven)) if budget >= least_bytes)
    budgets = {*_evenly_spaced(least_bytes, max(least_bytes, *ends)), *places}

    def bound(budget: int) -> float:
        quick_seconds = graph_bound_seconds(indexed, budget)
        return max([quick_seconds, *(seconds for peak, seconds in proven if peak >= budget)])

    return list(_bound_rows(sorted(budgets), bound))


def _unplanned(peak_bytes: int, seconds: float, status: str = "optimal") -> CurveRow:
    return CurveRow("none", peak_bytes, peak_bytes, seconds, seconds, status)


def _kept_whole(chain: Chain, link: Link | None) -> CurveRow:
    """The unplanned step of a chain file, in which another option of a stage may be faster than the one that keeps."""
    whole = keep_all_replay(chain)
    bound = min(bound_seconds(chain, whole.peak_bytes, link), whole.seconds)
    status = "optimal" if whole.seconds <= bound * (1 + _PROVEN) else "feasible"
    return _unplanned(whole.peak_bytes, whole.seconds, status)._replace(lower_bound_seconds=bound)


def _row(solution: Solution, name: str, *, outside_seconds: float = 0.0) -> CurveRow:
    assert solution.peak_bytes is not None and solution.seconds is not None
    return CurveRow(
        solver=name,
        budget_bytes=solution.peak_bytes,
        peak_bytes=solution.peak_bytes,
        seconds=solution.seconds + outside_seconds,
        lower_bound_seconds=solution.lower_bound_seconds + outside_seconds,
        status=solution.status,
        solve_seconds=solution.solve_seconds,
    )


def _with_bound(row: CurveRow, bound: float) -> CurveRow:
    """A row with what holds for all programs, not only for those of the menus."""
    least_seconds = min(row.lower_bound_seconds, bound)
    proven = least_seconds >= row.seconds * (1 - _PROVEN)
    return row._replace(lower_bound_seconds=least_seconds, status=row.status if proven else "feasible")


def _evenly_spaced(low: int, high: int) -> list[int]:
    return [int(budget) for budget in np.linspace(low, high, BOUND_POINTS, dtype=np.int64)]


def _bound_rows(budgets: Iterable[int], bound: Callable[[int], float]) -> Iterator[CurveRow]:
    for budget_bytes in budgets:
        seconds = bound(budget_bytes)
        if math.isfinite(seconds):
            yield CurveRow("lower_bound", budget_bytes, None, seconds, seconds, "bound")
