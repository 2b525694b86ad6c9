"""Curves: every solver's memory/time frontier for one profile, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.cost_model import chain_of
from profiler.records import Profile
from solvers import Chain, Solution
from solvers import frontier as solver_frontier
from solvers.lower_bound import bound_seconds

COLUMNS = ("solver", "budget_bytes", "peak_bytes", "seconds", "lower_bound_seconds", "status", "solve_seconds")
SOLVERS = ("keep_all", "recompute_all", "chen_sqrt", "chen_greedy", "rotor")
BOUND_POINTS = 40


def pareto(
    profile: Profile | str | Path, *, solvers: Sequence[str] = SOLVERS, time_limit_seconds: float | None = None
) -> pd.DataFrame:
    """The memory/time frontier of every solver.

    Args:
        profile: a Profile or the path of its file.
        solvers: methods to draw; ``ilp`` solves a handful of budgets one by one.
        time_limit_seconds: for methods that search.

    Returns:
        One row per point. Columns: ``solver``, ``budget_bytes`` (the smallest
        budget that the point answers), ``peak_bytes``, ``seconds`` (of the whole step),
        ``lower_bound_seconds``, ``status``, ``solve_seconds``. The rows of
        ``lower_bound`` have no peak: no plan of these stages within that
        budget is faster; the row ``none`` is the unplanned model.
    """
    if not isinstance(profile, Profile):
        profile = Profile.load(profile)
    chain = chain_of(profile)
    beside = profile.unplanned_seconds - chain.unplanned_seconds
    rows = [_unplanned(profile)]
    for name in solvers:
        rows += [_row(s, beside, name) for s in solver_frontier(chain, name, time_limit_seconds)]
    rows += _bound_rows(chain, rows, beside)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _unplanned(profile: Profile) -> dict[str, Any]:
    return {
        "solver": "none",
        "budget_bytes": profile.unplanned_peak_bytes,
        "peak_bytes": profile.unplanned_peak_bytes,
        "seconds": profile.unplanned_seconds,
        "lower_bound_seconds": profile.unplanned_seconds,
        "status": "optimal",
        "solve_seconds": 0.0,
    }


def _row(solution: Solution, beside: float, name: str) -> dict[str, Any]:
    assert solution.peak_bytes is not None and solution.seconds is not None
    return {
        "solver": name,
        "budget_bytes": solution.peak_bytes,
        "peak_bytes": solution.peak_bytes,
        "seconds": solution.seconds + beside,
        "lower_bound_seconds": solution.lower_bound_seconds + beside,
        "status": solution.status,
        "solve_seconds": solution.solve_seconds,
    }


def _bound_rows(chain: Chain, rows: list[dict[str, Any]], beside: float) -> Iterator[dict[str, Any]]:
    budgets = [row["peak_bytes"] for row in rows]
    for budget in np.linspace(min(budgets), max(budgets), BOUND_POINTS, dtype=np.int64):
        seconds = bound_seconds(chain, int(budget)) + beside
        yield {
            "solver": "lower_bound",
            "budget_bytes": int(budget),
            "peak_bytes": None,
            "seconds": seconds,
            "lower_bound_seconds": seconds,
            "status": "bound",
            "solve_seconds": 0.0,
        }
