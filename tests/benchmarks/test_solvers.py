"""The graph solvers' benchmark: runs apart, verdicts from rows, counts against the oracle, and one quick run of all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import graph_oracle, solvers
from benchmarks.graph_oracle import Instance, judge
from benchmarks.solver_claims import CLAIMS, Run, contradictions, verdicts
from benchmarks.solver_runs import Outcome, Task, peak_resident_mib, run_apart
from benchmarks.solvers import Ask, Case, open_case, options_from, plan, problem_path, share_of
from solvers.graph.orders import IndexedGraph, schedule_of
from solvers.problem.examples import training_graph
from solvers.problem.graph import Graph
from solvers.problem.solution import Solution

MEDIUM, LARGE = CLAIMS[1].text, CLAIMS[2].text
SMALL_GPT, LARGE_GPT = CLAIMS[3].text, CLAIMS[4].text
SMALL = CLAIMS[0].text


def found(seconds: float, bound: float, wall: float = 10.0) -> Outcome:
    return Outcome(status="feasible", wall_seconds=wall, seconds=seconds, peak_bytes=90, bound_seconds=bound)


def a_run(problem: str, nodes: int, outcome: Outcome, solver: str = "auto", limit_seconds: float | None = 60.0) -> Run:
    return Run(
        problem=problem,
        nodes=nodes,
        solver=solver,
        share=0.5,
        budget_bytes=100,
        unplanned_peak_bytes=200,
        unplanned_seconds=100.0,
        limit_seconds=limit_seconds,
        outcome=outcome,
    )


def verdict(claim: str, *runs: Run) -> str:
    return next(row["verdict"] for row in verdicts(runs) if row["claim"] == claim)


def a_task(**changes) -> Task:
    path = str(problem_path("random-100").resolve())
    return replace(Task(path=path, solver="demand", budget_bytes=2**30, limit_seconds=5.0, gap=0.0), **changes)


@pytest.mark.skipif(peak_resident_mib() is None, reason="the system tells no process its memory in /proc")
def test_a_solve_has_the_memory_of_its_own_process():
    ballast = b"\1" * (300 * 2**20)
    outcome = run_apart(a_task())
    here = peak_resident_mib()
    assert len(ballast) and here is not None and outcome.idle_mib is not None and outcome.resident_mib is not None
    assert outcome.seconds is not None and outcome.peak_bytes is not None and outcome.peak_bytes <= 2**30
    assert outcome.idle_mib <= outcome.resident_mib < 300 < here


def test_what_hangs_or_fails_or_is_refused_is_an_outcome():
    assert run_apart(a_task(solver="eviction"), grace_seconds=-4.0).status == "killed"
    failed = run_apart(a_task(path="missing.json"))
    assert failed.status == "failed" and "missing.json" in failed.remark
    refused = run_apart(a_task(solver="exhaustive"))
    assert refused.status == "refused" and "at most 12 nodes" in refused.remark


def test_a_gap_is_held_against_the_number_asked_for():
    near, far = found(110.0, 109.95), found(110.0, 109.8)
    assert verdict(SMALL, a_run("a", 100, near)) == "reached"
    assert verdict(SMALL, a_run("a", 100, near), a_run("b", 150, far)) == "missed"
    assert verdict(SMALL, a_run("a", 100, near), a_run("b", 150, far, solver="moments")) == "reached"
    assert verdict(LARGE, a_run("a", 2000, found(110.0, 105.0))) == "reached"
    assert verdict(LARGE, a_run("a", 2000, found(110.0, 104.0))) == "missed"
    assert verdict(LARGE, a_run("a", 100, near)) == "not measured"


def test_the_best_known_may_be_another_solvers():
    by_auto, other = a_run("a", 400, found(110.0, 100.0)), a_run("a", 400, found(108.0, 100.0), "moments")
    assert verdict(MEDIUM, by_auto) == "reached"
    assert verdict(MEDIUM, by_auto, other) == "missed"
    assert verdict(MEDIUM, by_auto, replace(other, limit_seconds=600.0, solver="auto")) == "missed"
    assert verdict(MEDIUM, by_auto, replace(other, budget_bytes=101)) == "reached"


def test_no_plan_is_a_miss_unless_there_is_none():
    known = a_run("a", 400, found(110.0, 100.0))
    for status in ("unknown", "killed", "failed"):
        assert verdict(MEDIUM, known, a_run("b", 400, Outcome(status=status, wall_seconds=10.0))) == "missed"
    assert verdict(MEDIUM, known, a_run("b", 400, Outcome(status="infeasible", wall_seconds=10.0))) == "reached"


def test_a_late_or_longer_run_reaches_nothing():
    good = found(110.0, 110.0)
    assert verdict(SMALL, a_run("a", 100, replace(good, wall_seconds=61.0))) == "reached"
    assert verdict(SMALL, a_run("a", 100, replace(good, wall_seconds=70.0))) == "missed"
    assert verdict(SMALL, a_run("a", 100, good, limit_seconds=600.0)) == "not measured"


def test_seconds_are_those_of_the_graph_named():
    small = a_run("gpt4-234", 234, found(110.0, 110.0, wall=1.9))
    large = a_run("gpt48-2610", 2610, found(110.0, 110.0, wall=31.0), limit_seconds=None)
    assert verdict(SMALL_GPT, small, large) == "reached"
    assert verdict(LARGE_GPT, small, large) == "missed"
    assert verdict(LARGE_GPT, replace(large, limit_seconds=60.0)) == "not measured"


def test_a_bound_above_a_plan_is_told():
    runs = [a_run("a", 100, found(110.0, 100.0)), a_run("a", 100, found(120.0, 111.0), "moments")]
    assert contradictions(runs) == runs[1:]
    assert contradictions([runs[0], replace(runs[1], budget_bytes=99)]) == []
    assert any("(has to be 0): 1" in note for note in solvers.notes(runs))


def test_budgets_lie_between_the_largest_op_and_the_unplanned_peak():
    case = open_case(problem_path("random-100"))
    assert case.budget_bytes(0.0) == case.least_bytes < case.budget_bytes(0.5) < case.peak_bytes
    assert case.budget_bytes(1.0) == case.peak_bytes
    assert share_of("12.5%") == 0.125
    for text in ("50", "101%", "-1%", "half", "%"):
        with pytest.raises(ValueError, match="expected a percentage"):
            share_of(text)


def test_problems_are_named_by_how_they_begin():
    assert problem_path("gpt4").stem == "gpt4-234"
    for name in ("gpt", "random", "missing"):
        with pytest.raises(ValueError, match="expected a file or one of"):
            problem_path(name)


def test_the_plan_asks_for_what_the_command_line_says():
    case = Case(name="a", path=Path("a"), nodes=400, least_bytes=1, peak_bytes=9, unplanned_seconds=1.0)
    asks = plan([case], options_from(["--solvers", "auto", "checkmate"]))
    assert [(ask.solver, ask.share, ask.limit_seconds) for ask in asks] == [
        *(("auto", share, 60.0) for share in (0.1, 0.3, 0.5, 0.7)),
        ("checkmate", 0.5, 20.0),
    ]
    assert [ask.too_large for ask in asks] == [False] * 4 + [True]
    asked = plan([case], options_from(["--solvers", "checkmate", "--budgets", "20%", "--time-limit", "90", "--long"]))
    assert [(ask.share, ask.limit_seconds, ask.too_large) for ask in asked] == [(0.2, 90.0, False), (0.5, 600.0, False)]
    unlimited = plan([replace(case, name="gpt48-1")], options_from(["--solvers", "auto", "--budgets", "50%"]))
    assert [ask.limit_seconds for ask in unlimited] == [60.0, None]


@pytest.mark.parametrize(
    "arguments", [["--budgets", "2"], ["--problems", "x"], ["--time-limit", "0"], ["--exact", "x"]]
)
def test_a_wrong_command_line_is_refused_before_anything_runs(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        options_from(arguments)
    assert stopped.value.code == 2 and "expected" in capsys.readouterr().err


def test_proofs_come_from_the_bound_or_from_the_program_that_ended():
    case = Case(name="a", path=Path("a"), nodes=99, least_bytes=1, peak_bytes=9, unplanned_seconds=1.0)
    assert not Ask(case=case, solver="checkmate", share=0.5, limit_seconds=20.0).too_large
    open_end, optimal = found(110.0, 100.0), replace(found(110.0, 110.0), status="optimal")
    runs = [
        a_run("a", 99, open_end, "checkmate"),
        a_run("a", 99, replace(open_end, wall_seconds=60.2), "checkmate"),
        a_run("a", 99, open_end),
        a_run("a", 99, optimal),
    ]
    told = solvers.exact_table(runs)["seconds_to_proof"].tolist()
    assert told == ["10.00", "none in 60 s", "none in 60 s", "10.00"]


def test_one_quick_run_writes_both_tables(tmp_path, capsys):
    chosen = ["--problems", "random-100", "--solvers", "auto", "demand", "--time-limit", "2"]
    solvers.main(["--quick", *chosen, "--out", str(tmp_path)])
    first, second = pd.read_csv(tmp_path / "solvers.csv").to_dict("records")
    assert (first["solver"], second["solver"], first["budget"]) == ("auto", "demand", "50%")
    assert 1 <= second["bound"] <= first["bound"] <= first["objective"] <= second["objective"]
    assert all(0 < float(row["peak_of_budget"].rstrip("%")) <= 100 for row in (first, second))
    assert (tmp_path / "solvers.md").read_text() in capsys.readouterr().out
    told = {row["claim"]: row["verdict"] for row in pd.read_csv(tmp_path / "solvers-verdicts.csv").to_dict("records")}
    assert told.pop(SMALL) in ("reached", "missed") and set(told.values()) == {"not measured"}


GRAPH: Graph = training_graph(3)
INDEXED = IndexedGraph(GRAPH)


def solved(status, order, bound: float = 9.0) -> Solution:
    return Solution(
        solver="test",
        status=status,
        schedule=None if order is None else schedule_of(INDEXED, order),
        peak_bytes=None,
        seconds=None,
        lower_bound_seconds=bound,
        solve_seconds=0.0,
    )


def test_answers_are_judged_by_the_oracle():
    feasible = Instance(graph=GRAPH, budget_bytes=9, optimum_seconds=9.0)
    once = [0, 1, 2, 3, 4, 5]
    assert judge(feasible, solved("optimal", once)) == ["equal"]
    assert judge(replace(feasible, optimum_seconds=10.0), solved("optimal", once)) == ["below"]
    assert judge(replace(feasible, optimum_seconds=8.0), solved("feasible", once, 8.0)) == ["above"]
    assert judge(replace(feasible, optimum_seconds=8.0), solved("optimal", once)) == [
        "bound_above",
        "above",
        "optimal_wrongly",
    ]
    assert judge(feasible, solved("infeasible", None)) == ["infeasible_wrongly"]
    assert judge(feasible, solved("unknown", None)) == ["no_plan_found"]
    infeasible = replace(feasible, optimum_seconds=None)
    assert judge(infeasible, solved("infeasible", None)) == ["infeasible_rightly"]
    assert judge(infeasible, solved("unknown", None)) == ["infeasible_unproven"]
    assert judge(infeasible, solved("feasible", once)) == ["plan_of_none"]
    with pytest.raises(ValueError, match="has never run"):
        judge(feasible, solved("feasible", once[:-1]))


def test_the_oracle_counts_every_instance(tmp_path):
    graph_oracle.main(["--seeds", "5", "--solvers", "keep_all", "intervals", "auto", "--out", str(tmp_path)])
    rows = pd.read_csv(tmp_path / "graph-oracle.csv").to_dict("records")
    assert [row["verdict"] for row in rows] == ["never wrong"] * 3
    assert all(sum(row[name] for name in graph_oracle.FINE) == row["instances"] for row in rows)
    exact = rows[-1]
    assert (exact["solver"], exact["equal"], exact["infeasible_rightly"]) == ("auto", 10, exact["instances"] - 10)
