"""Graph problem files at the command line: solved, saved so that anyone can replay it, shown, drawn, and refused."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
import pytest

import planner
from planner.cli import solutions
from planner.plans.pareto_curves import COLUMNS
from solvers.problem.examples import training_graph
from tests.support.command_line import SOLVE_KEYS, done, refused, run
from tests.support.graph_documents import document, node, replayed, training_step


@pytest.fixture
def step(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(json.dumps(training_step()))
    return path


@pytest.fixture
def deep(tmp_path):
    """Sixteen nodes, more than the oracle takes: unplanned peak 10,000, no node needs more than 3,000."""
    path = tmp_path / "deep.json"
    path.write_text(json.dumps(training_graph(8, size_bytes=1000).to_dict()))
    return path


def test_a_graph_at_its_unplanned_peak_runs_every_node_once(step):
    solved = json.loads(done("solve", step, "--budget", "100%", "--json").stdout)
    assert set(solved) >= SOLVE_KEYS
    assert (solved["unplanned_peak_bytes"], solved["unplanned_seconds"], solved["resident_bytes"]) == (361, 11.0, 10)
    assert (solved["status"], solved["gap"], solved["interrupted"]) == ("optimal", 0.0, False)
    assert [(stage["name"], stage["decision"], stage["runs"]) for stage in solved["stages"]] == [
        (name, "keep", 1) for name in ("e", "w", "m", "l", "gm", "gw")
    ]


def test_a_graph_below_its_unplanned_peak_recomputes_the_cheapest(step):
    """75% are 270: at gm the 100 of e have to go; it runs again for gw, which e costs 1 s."""
    solved = json.loads(done("solve", step, "--budget", "75%", "--json").stdout)
    assert solved["budget_bytes"] == 270
    assert (solved["status"], solved["predicted_seconds"], solved["recomputed_seconds"]) == ("optimal", 12.0, 1.0)
    again = [stage for stage in solved["stages"] if stage["decision"] == "recompute"]
    assert [(stage["name"], stage["runs"], stage["extra_seconds"]) for stage in again] == [("e", 2, 1.0)]


@pytest.mark.parametrize("budget", ["100%", "75%", "60%", "40%"])
def test_the_actions_of_a_plan_file_give_the_stated_peak_and_seconds(deep, tmp_path, budget):
    done("solve", deep, "--budget", budget, "--time-limit", "1", "-o", tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["format"], plan["version"]) == ("planner-graph-solution", 1)
    peak, seconds = replayed(json.loads(deep.read_text()), plan["actions"])
    assert (peak, seconds) == (plan["predicted_peak_bytes"], plan["predicted_seconds"])
    assert peak <= plan["budget_bytes"]
    runs = [sum(a == {"op": "compute", "node": stage["name"]} for a in plan["actions"]) for stage in plan["stages"]]
    assert runs == [stage["runs"] for stage in plan["stages"]]


def test_the_plan_file_and_the_json_say_the_same(step, tmp_path):
    printed = json.loads(done("solve", step, "--budget", "75%", "--json", "-o", tmp_path / "plan.json").stdout)
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert {key: saved[key] for key in printed} == printed
    assert set(saved) - set(printed) == {"format", "version", "actions"}


def test_solve_prints_a_short_report_that_show_prints_again(step, tmp_path):
    printed = done("solve", step, "--budget", "75%", "-o", tmp_path / "plan.json").stdout
    assert "no schedule of this graph within the budget is faster" in printed
    assert "1 extra run of 1 node of 6" in printed
    assert "12.0 s: 1.09 x the unplanned 11.0 s" in printed
    assert done("show", tmp_path / "plan.json").stdout == printed


def test_an_infeasible_graph_exits_3_and_names_the_budget_and_the_node(step, tmp_path):
    result = run("solve", step, "--budget", "50", "--json", "-o", tmp_path / "never.json")
    refusal = json.loads(result.stdout)
    assert (result.exit_code, refusal["status"]) == (3, "infeasible")
    assert set(refusal) >= SOLVE_KEYS | {"minimum_budget_bytes", "reason"}
    assert refusal["reason"].startswith("running node 'gw' needs 269 bytes")  # e, w, gm, gw and 10 resident
    assert refusal["minimum_budget_bytes"] == 269
    assert refusal["lower_bound_seconds"] >= 11.0
    assert "infeasible: " in result.stderr and "269 bytes" in result.stderr and "'gw'" in result.stderr
    assert not (tmp_path / "never.json").exists()
    assert done("solve", step, "--budget", "269")


def test_nothing_found_and_nothing_ruled_out_is_no_proof(deep):
    result = run("solve", deep, "--budget", "5000", "--solver", "keep_all", "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["status"]) == (3, "unknown")
    assert answer["lower_bound_seconds"] >= 24.0
    assert answer["reason"].startswith("running node ")
    assert "unknown: " in result.stderr and "not proven" in result.stderr
    minimum = str(answer["minimum_budget_bytes"])
    assert minimum in result.stderr and done("solve", deep, "--budget", minimum, "--time-limit", "5")


def test_nothing_found_is_infeasible_without_proof():
    graph = training_graph(8)
    with pytest.raises(planner.Infeasible) as caught:
        solutions.solve_graph_problem(graph, "5", solver="keep_all", time_limit_seconds=None)
    assert isinstance(caught.value, ValueError) and caught.value.status == "unknown"
    assert caught.value.budget_bytes == 5


def test_an_interrupted_search_gives_its_best_plan(step, tmp_path, monkeypatch):
    solve = solutions.solve_graph
    monkeypatch.setattr(solutions, "solve_graph", lambda *a: dataclasses.replace(solve(*a), interrupted=True))
    result = run("solve", step, "--budget", "75%", "--json", "-o", tmp_path / "plan.json")
    assert result.exit_code == 130 and "interrupted: best plan so far" in result.stderr
    assert json.loads(result.stdout)["interrupted"] is True
    assert json.loads((tmp_path / "plan.json").read_text())["interrupted"] is True


def with_change(change) -> str:
    problem = training_step()
    change(problem)
    return json.dumps(problem)


BROKEN = [
    (with_change(lambda p: p["nodes"][0].update(inputs=["gw"])), "expected no cycle, got e -> "),
    (with_change(lambda p: p["nodes"][1].update(name="e")), "duplicate name 'e'"),
    (with_change(lambda p: p["nodes"][1].update(inputs=["nix"])), "missing node 'nix'"),
    (with_change(lambda p: p["nodes"].reverse()), "topological order"),
    (with_change(lambda p: p["nodes"][2].update(seconds=float("nan"))), "finite numbers, got nan at nodes.2.seconds"),
    (with_change(lambda p: p["nodes"][2].update(output_bytes=-1)), "node 'm': expected output_bytes"),
    (
        with_change(lambda p: p["nodes"][2].update(output_bytes=10**30)),
        "up to 2**50, got 1e+30 at nodes.2",
    ),
    (
        with_change(lambda p: p["nodes"][2].update(seconds=10**400)),
        "up to 2**50, got a longer one at nodes.2",
    ),
    (with_change(lambda p: p["nodes"][2].pop("seconds")), "expected a field seconds, got none at nodes[2]"),
    (with_change(lambda p: p.update(outputs=["nix"])), "missing node 'nix'"),
    (with_change(lambda p: p.update(nodes=[])), "at least one node"),
    (with_change(lambda p: p.update(version=2)), "version 1, got 2"),
    (with_change(lambda p: p.update(format="graph")), "planner-chain or planner-graph, got 'graph'"),
    (json.dumps(training_step())[:99], "breaks off"),
]


@pytest.mark.parametrize(("text", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_a_broken_graph_is_refused_with_its_file(tmp_path, text, words):
    (tmp_path / "broken.json").write_text(text)
    for command in (("solve", "--budget", "75%"), ("pareto",)):
        message = refused(command[0], tmp_path / "broken.json", *command[1:])
        assert "broken.json" in message and words in message


def test_an_unknown_solver_is_answered_with_those_of_the_problem_s_kind(step):
    message = refused("solve", step, "--budget", "75%", "--solver", "rotor")
    assert "hierarchy" in message and "'rotor'" in message and "chen_greedy" not in message


def test_a_budget_beyond_64_bits_fits_everything(step):
    assert json.loads(done("solve", step, "--budget", "99999999TiB", "--json").stdout)["recomputed_seconds"] == 0.0


def test_names_are_no_markup(tmp_path):
    problem = document(node("[red]a"), node("b", "[red]a", output_bytes=300), node("c", "b"), node("d", "c [red]a"))
    (tmp_path / "named.json").write_text(json.dumps(problem))
    assert "[red]a" in done("solve", tmp_path / "named.json", "--budget", "400").stdout


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("gap", None, "got null at gap"),
        ("stages", [3], "at stages[0]"),
        ("stages", [{"name": "e"}], "field decision at stages[0]"),
        ("solver", 1, "at solver"),
        ("luck", 7, "got also luck"),
    ],
)
def test_a_damaged_solution_is_not_shown(step, tmp_path, field, value, said):
    done("solve", step, "--budget", "75%", "-o", tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, field: value}))
    message = refused("show", tmp_path / "plan.json")
    assert "plan.json: expected the fields of a solution" in message and said in message and "solve again" in message


@pytest.mark.slow
def test_pareto_of_a_graph_has_the_columns_curves_and_a_bound_below_them(step, tmp_path):
    done("pareto", step, "-o", tmp_path / "curve.png", "--csv", tmp_path / "curve.csv", "--time-limit", "4")
    frame = pd.read_csv(tmp_path / "curve.csv")
    assert tuple(frame.columns) == COLUMNS
    rows = frame.to_dict("records")
    assert {"none", "auto", "moments", "hierarchy", "demand", "lower_bound"} <= {row["solver"] for row in rows}
    bound = {row["budget_bytes"]: row["seconds"] for row in rows if row["solver"] == "lower_bound"}
    assert min(bound) == 269
    assert [bound[b] for b in sorted(bound)] == sorted(bound.values(), reverse=True)
    plans = [row for row in rows if row["solver"] != "lower_bound"]
    for row in plans:
        below = max(seconds for budget, seconds in bound.items() if budget >= row["peak_bytes"])
        assert row["lower_bound_seconds"] <= below <= row["seconds"]
    auto = [row for row in plans if row["solver"] == "auto"]
    assert (min(row["peak_bytes"] for row in auto), min(row["seconds"] for row in auto)) == (269, 11.0)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_bound_starts_at_the_largest_op_and_the_plans_where_they_fit(tmp_path):
    """Each of two outputs needs 400 alone, and the second one beside the first 500."""
    problem = document(node("u", transient_bytes=300), node("v", transient_bytes=300), outputs="u v")
    (tmp_path / "two.json").write_text(json.dumps(problem))
    done("pareto", tmp_path / "two.json", "--csv", tmp_path / "curve.csv", "--time-limit", "4")
    rows = pd.read_csv(tmp_path / "curve.csv").to_dict("records")
    assert min(row["budget_bytes"] for row in rows if row["solver"] == "lower_bound") == 400
    assert min(row["budget_bytes"] for row in rows if row["solver"] != "lower_bound") == 500


def test_pareto_names_what_came_to_no_turn(deep, tmp_path):
    result = done("pareto", deep, "--csv", tmp_path / "curve.csv", "--time-limit", "0.000001")
    assert "left out: " in result.stderr and "hierarchy" in result.stderr and "--time-limit" in result.stderr
    assert "seconds above zero" in refused("pareto", deep, "--time-limit", "0")
