"""Curves: no bound is above a plan that fits its budget, and no point of a method is beaten by another."""

from __future__ import annotations

from random import Random

import pandas as pd
import pytest

import planner
from planner import Offload
from planner.step_problem import problem_of_call
from solvers import Chain, Link, Problem, solve_chain
from solvers.problem.examples import equal_stages
from tests.support.chain_steps import AROUND, KIB, chain_step
from tests.support.chains import random_chain, with_offload_units

GRAPH = problem_of_call(chain_step(layers=8), AROUND).graph  # its peak is ten storages of 100 KiB


def points_and_bounds(table: pd.DataFrame) -> tuple[list[dict], dict[int, float]]:
    rows = [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]
    bounds = {row["budget_bytes"]: row["seconds"] for row in rows if row["solver"] == "lower_bound"}
    return [row for row in rows if row["solver"] not in ("none", "lower_bound")], bounds


def test_no_bound_of_a_graph_is_above_a_plan_that_fits() -> None:
    points, bounds = points_and_bounds(planner.pareto(GRAPH, solvers=["auto"], time_limit_seconds=7))
    assert min(row["budget_bytes"] for row in points) == min(bounds) == 400 * KIB
    for budget, bound in bounds.items():
        assert all(bound <= row["seconds"] * (1 + 1e-9) for row in points if row["budget_bytes"] <= budget)
    for row in points:
        others = [other for other in points if other["budget_bytes"] <= row["budget_bytes"] and other is not row]
        assert all(row["seconds"] < other["seconds"] for other in others)
        assert row["lower_bound_seconds"] <= bounds[row["budget_bytes"]] * (1 + 1e-9)
        is_optimal = row["seconds"] <= row["lower_bound_seconds"] * (1 + 1e-6)
        assert row["status"] == ("optimal" if is_optimal else "feasible")


def test_where_a_method_finds_nothing_the_bound_goes_up_to_the_unplanned_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.plans.pareto_curves.graph_frontier", lambda *_: [])
    points, bounds = points_and_bounds(planner.pareto(GRAPH, solvers=["demand"]))
    assert not points and (min(bounds), max(bounds)) == (400 * KIB, 1000 * KIB)


@pytest.mark.parametrize("solver", ["rotor", "pofo"])
def test_a_method_that_weighs_copies_has_the_link(solver: str) -> None:
    """Over a link that takes no time everything that may travel is away where it is not needed."""
    chain = with_offload_units(equal_stages(4), Random(1))
    points, bounds = points_and_bounds(planner.pareto(chain, solvers=[solver], offload=Offload(link_gbps=float("inf"))))
    link = Link(to_host_bytes_per_second=float("inf"), to_device_bytes_per_second=float("inf"))
    for row in points:
        solved = solve_chain(Problem(chain=chain, budget_bytes=int(row["peak_bytes"]), link=link), solver)
        assert solved.seconds == row["seconds"] >= bounds.get(row["budget_bytes"], 0.0) * (1 - 1e-9)
    alone, _ = points_and_bounds(planner.pareto(chain, solvers=["rotor"]))
    least, least_alone = (min(row["peak_bytes"] for row in rows if row["seconds"] == 12) for rows in (points, alone))
    assert least < least_alone
    with pytest.raises(ValueError, match="pofo: expected a link"):
        planner.pareto(chain, solvers=["pofo"])


def test_methods_that_recompute_alone_claim_no_more_than_holds_with_copies() -> None:
    chain = with_offload_units(equal_stages(4), Random(1))
    points, bounds = points_and_bounds(planner.pareto(chain, offload=Offload(link_gbps=float("inf"))))
    for row in points:
        at_least = [other["seconds"] for other in points if other["budget_bytes"] <= row["budget_bytes"]]
        assert row["lower_bound_seconds"] <= min(at_least) * (1 + 1e-9)
        assert row["lower_bound_seconds"] <= max(s for budget, s in bounds.items() if budget >= row["budget_bytes"])


@pytest.mark.parametrize("seed", range(20))
def test_the_unplanned_step_of_a_chain_is_optimal_where_nothing_is_faster(seed: int) -> None:
    """Another option than the one that keeps everything may be faster."""
    chain = random_chain(seed)
    table = planner.pareto(chain, solvers=["keep_all"])
    (unplanned,) = (row for row in table.to_dict("records") if row["solver"] == "none")
    best = solve_chain(Problem(chain=chain, budget_bytes=int(unplanned["peak_bytes"])), "exhaustive")
    assert best.seconds is not None and unplanned["lower_bound_seconds"] <= best.seconds * (1 + 1e-9)
    assert unplanned["status"] == "feasible" or best.seconds == pytest.approx(unplanned["seconds"])


def test_the_unplanned_step_of_equal_stages_is_optimal() -> None:
    table = planner.pareto(Chain(stages=equal_stages(3).stages), solvers=["keep_all"])
    assert table["status"].tolist()[0] == "optimal"
    assert table["lower_bound_seconds"].tolist()[0] == pytest.approx(9.0)
