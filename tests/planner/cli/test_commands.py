"""The command line: every command's output, JSON keys and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest

import planner
from planner import zoo
from planner.cli import demo, profiling
from planner.cli.arguments import spread
from planner.cli.output import Output
from planner.plans.pareto_curves import COLUMNS
from profiler.json_files import write_document
from solvers import Schedule, replay
from tests.support import ROOT
from tests.support.command_line import SMALL, SOLVE_KEYS, done, refused, run
from tests.support.small_chain import small_chain

TRAIN_KEYS = {
    "budget_bytes", "predicted_peak_bytes", "measured_peak_bytes", "predicted_seconds", "measured_seconds",
    "unplanned_seconds", "losses",
}  # fmt: skip
ROW_KEYS = {
    "solver", "status", "predicted_peak_bytes", "measured_peak_bytes", "predicted_seconds", "measured_seconds",
}  # fmt: skip


def test_profile_prints_its_stages_and_writes_a_profile(files):
    result = done("profile", "zoo:mlp", *SMALL, "-o", files / "again.json")
    profile = planner.Profile.load(files / "again.json")
    assert all(stage.name in result.stdout for stage in profile.stages if stage.kind == "stage")
    assert f"{profile.unplanned_peak_bytes:,} bytes" in result.stdout
    assert "again.json" in result.stderr


def test_profile_takes_several_stage_patterns_after_one_option(files):
    done("profile", "zoo:mlp", *SMALL, "--stages", "4", "5", "-o", files / "named.json")
    stages = [s.name for s in planner.Profile.load(files / "named.json").stages if s.kind == "stage"]
    assert stages == ["4", "5"]


@pytest.mark.slow
def test_profile_ops_prints_the_largest_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "OPS_SHOWN", 5)
    shown = done("profile", "zoo:mlp", *SMALL, "--ops").stdout
    assert shown.count("aten.") == 5 and "Ops: 5 of " in shown and "of new storage" in shown


def test_solve_json_has_the_keys_and_keeps_its_word(files):
    result = done("solve", files / "profile.json", "--budget", "85%", "--json")
    document = json.loads(result.stdout)
    assert set(document) >= SOLVE_KEYS
    assert document["status"] in ("optimal", "feasible")
    assert document["predicted_peak_bytes"] <= document["budget_bytes"] < document["unplanned_peak_bytes"]
    assert document["lower_bound_seconds"] <= document["predicted_seconds"]
    assert all({"name", "decision"} <= set(stage) for stage in document["stages"])
    assert any(stage["decision"] != "keep" for stage in document["stages"])


def test_solve_prints_a_table_and_writes_the_plan_that_show_prints_again(files):
    output = files / "printed.json"
    printed = done("solve", files / "profile.json", "--budget", "85%", "--solver", "rotor", "-o", output).stdout
    plan = planner.Plan.load(output)
    assert plan.solver == "rotor"
    assert f"{plan.predicted_peak_bytes:,} bytes" in printed
    shown = done("show", output).stdout
    assert [line for line in printed.splitlines() if line.startswith("predicted")] == [
        line for line in shown.splitlines() if line.startswith("predicted")
    ]


def test_show_prints_a_profile_too(files):
    profile = planner.Profile.load(files / "profile.json")
    assert profile.fingerprint in done("show", files / "profile.json").stdout


@pytest.mark.slow
def test_profile_without_menus_measures_whole_stages_only(tmp_path):
    settings = ["--set", "layers=2", "batch=2", "hidden=32", "seq=32", "vocab=100"]
    for flags, measured in (((), True), (("--no-menus",), False)):
        done("profile", "zoo:gpt2", *settings, "--stages", "transformer.h.*", *flags, "-o", tmp_path / "profile.json")
        assert any(menu.options for menu in planner.Profile.load(tmp_path / "profile.json").menus) is measured


def test_an_infeasible_budget_exits_3_and_the_smallest_one_it_names_is_feasible(files):
    result = run("solve", files / "profile.json", "--budget", "1KiB", "--json", "-o", files / "never.json")
    document = json.loads(result.stdout)
    assert result.exit_code == 3
    assert document["status"] == "infeasible" and document["reason"]
    assert set(document) >= SOLVE_KEYS
    assert document["lower_bound_seconds"] > 0
    assert str(document["minimum_budget_bytes"]) in result.stderr
    assert not (files / "never.json").exists()
    assert done("solve", files / "profile.json", "--budget", str(document["minimum_budget_bytes"]))
    below = run("solve", files / "profile.json", "--budget", str(document["minimum_budget_bytes"] - 1))
    assert (below.exit_code, below.stdout) == (3, "")


def test_solve_of_a_chain_file_writes_a_schedule_that_replays(tmp_path):
    chain = small_chain()
    write_document(tmp_path / "chain.json", chain.to_dict())
    result = done(
        "solve", tmp_path / "chain.json", "--budget", "60%", "--solver", "rotor", "--json", "-o", tmp_path / "out.json"
    )
    document, saved = json.loads(result.stdout), json.loads((tmp_path / "out.json").read_text())
    assert set(document) >= SOLVE_KEYS
    assert [stage["name"] for stage in document["stages"]] == ["first", "second", "third", "fourth"]
    assert document["unplanned_seconds"] == 12.0
    replayed = replay(chain, Schedule.from_list(saved["schedule"]))
    assert saved["format"] == "planner-chain-solution"
    assert replayed.peak_bytes == document["predicted_peak_bytes"] <= document["budget_bytes"]
    assert replayed.seconds == document["predicted_seconds"] == 12.0 + document["recomputed_seconds"]


def test_at_the_unplanned_peak_a_chain_recomputes_nothing(tmp_path):
    write_document(tmp_path / "chain.json", small_chain().to_dict())
    document = json.loads(done("solve", tmp_path / "chain.json", "--budget", "100%", "--json").stdout)
    assert {stage["decision"] for stage in document["stages"]} == {"keep"}
    assert (document["status"], document["recomputed_seconds"]) == ("optimal", 0.0)


def test_a_forgotten_percent_sign_is_asked_for(files):
    refusal = run("solve", files / "profile.json", "--budget", "60")
    assert refusal.exit_code == 3
    assert "60 bytes (60 B; did you mean 60%?) is too small" in refusal.stderr


def test_an_infeasible_chain_exits_3(tmp_path):
    write_document(tmp_path / "chain.json", small_chain().to_dict())
    result = run("solve", tmp_path / "chain.json", "--budget", "2", "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert document["lower_bound_seconds"] >= 12.0
    assert done("solve", tmp_path / "chain.json", "--budget", str(document["minimum_budget_bytes"]))


def test_show_prints_the_solution_of_a_chain_again(tmp_path):
    write_document(tmp_path / "chain.json", small_chain().to_dict())
    printed = done("solve", tmp_path / "chain.json", "--budget", "60%", "-o", tmp_path / "solution.json").stdout
    assert "third" in printed
    assert done("show", tmp_path / "solution.json").stdout.startswith(printed)


def test_pareto_writes_the_table_and_the_picture(files):
    result = done("pareto", files / "profile.json", "-o", files / "curve.png", "--csv", files / "curve.csv")
    frame = pd.read_csv(files / "curve.csv")
    assert tuple(frame.columns) == COLUMNS
    assert {"none", "keep_all", "recompute_all", "chen_sqrt", "chen_greedy", "rotor"} <= set(frame["solver"])
    assert (files / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "rotor" in result.stdout


def test_pareto_of_a_chain_starts_at_the_step_that_keeps_everything(tmp_path):
    write_document(tmp_path / "chain.json", small_chain().to_dict())
    done("pareto", tmp_path / "chain.json", "-o", tmp_path / "curve.png", "--csv", tmp_path / "curve.csv")
    frame = pd.read_csv(tmp_path / "curve.csv")
    assert tuple(frame.columns) == COLUMNS
    points = {row["solver"]: (row["peak_bytes"], row["seconds"]) for row in frame.to_dict("records")}
    assert points["none"] == points["keep_all"] and points["none"][1] == 12.0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_train_holds_the_prediction_against_the_measurement(files):
    args = ("train", "zoo:mlp", *SMALL, "--plan", files / "plan.json", "--steps", "4")
    document = json.loads(done(*args, "--json").stdout)
    plan = planner.Plan.load(files / "plan.json")
    assert set(document) >= TRAIN_KEYS
    assert document["unplanned_seconds"] == plan.unplanned_seconds
    assert document["predicted_peak_bytes"] == plan.predicted_peak_bytes
    assert document["measured_peak_bytes"] <= plan.budget_bytes
    assert len(document["losses"]) == 4
    workload = zoo.build("mlp", layers=8, hidden=32, batch=1024)
    assert document["losses"] == [workload.step() for _ in range(4)]  # the plan changes nothing
    assert "within the budget" in done(*args).stdout


def test_train_says_null_for_a_loss_that_is_no_number(files, tmp_path):
    target = f"{files / 'targets.py'}:not_a_number"
    done("profile", target, "-o", tmp_path / "profile.json")
    done("solve", tmp_path / "profile.json", "--budget", "100%", "-o", tmp_path / "plan.json")
    result = done("train", target, "--plan", tmp_path / "plan.json", "--steps", "1", "--json")
    assert json.loads(result.stdout)["losses"] == [None]


@pytest.mark.slow
def test_compare_has_a_row_per_solver_and_the_unplanned_one(files):
    document = json.loads(
        done("compare", "zoo:mlp", "--set", "layers=6", "--set", "batch=512", "--budget", "85%", "--json").stdout
    )
    rows = {row["solver"]: row for row in document["rows"]}
    assert list(rows) == ["none", "keep_all", "recompute_all", "chen_sqrt", "chen_greedy", "rotor", "ilp", "auto"]
    assert all(set(row) >= ROW_KEYS for row in rows.values())
    assert rows["none"]["predicted_peak_bytes"] == rows["none"]["measured_peak_bytes"]
    assert rows["keep_all"]["status"] == "unknown" and rows["keep_all"]["measured_peak_bytes"] is None
    for row in rows.values():
        if row["status"] in ("optimal", "feasible"):
            assert row["measured_peak_bytes"] <= document["budget_bytes"]
    assert rows["auto"]["predicted_seconds"] <= rows["rotor"]["predicted_seconds"]


def test_compare_exits_3_where_no_solver_fits(files):
    result = run("compare", "zoo:mlp", *SMALL, "--budget", "1KiB", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 3
    assert document["status"] == "infeasible"
    refused_rows = [row for row in document["rows"] if row["solver"] != "none"]
    assert document["minimum_budget_bytes"] == min(row["minimum_budget_bytes"] for row in refused_rows)
    assert "infeasible: " in result.stderr


def test_headroom_auto_is_what_the_profile_says(files):
    document = json.loads(
        done("solve", files / "profile.json", "--budget", "90%", "--headroom", "auto", "--json").stdout
    )
    assert document["predicted_peak_bytes"] <= document["budget_bytes"]


@pytest.mark.parametrize("limit", ["nan", "0", "-1"])
@pytest.mark.parametrize("command", [["solve", "--budget", "80%"], ["pareto"]])
def test_a_time_in_which_nothing_can_be_searched_is_refused(files, command, limit):
    said = refused(command[0], files / "profile.json", *command[1:], "--time-limit", limit)
    assert said.startswith("--time-limit: expected seconds above zero")


def test_a_search_may_take_any_time(files):
    assert done("solve", files / "profile.json", "--budget", "80%", "--time-limit", "inf", "--json").exit_code == 0


@pytest.mark.slow
def test_what_was_measured_is_in_the_json_of_show(files):
    document = json.loads(done("show", files / "plan.json", "--measure", "--json").stdout)
    assert document["measured_peak_bytes"] == document["predicted_peak_bytes"]
    assert document["measured_unplanned_peak_bytes"] == document["unplanned_peak_bytes"]
    assert document["measured_seconds"] > 0


@pytest.mark.slow
def test_the_demo_goes_the_whole_way(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = demo.run_demo(Output(), build=lambda: zoo.build("mlp", layers=8, hidden=32, batch=1024))
    assert (tmp_path / "planner-demo" / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert "bit for bit" in capsys.readouterr().out
    assert json.loads(json.dumps(found)) == found and set(found["plan"]) >= SOLVE_KEYS
    assert found["planned"]["measured_peak_bytes"] == found["plan"]["predicted_peak_bytes"]


@pytest.mark.slow
def test_the_demo_refuses_a_plan_that_changes_the_losses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = [demo._Trained(1, (1.0,), []), demo._Trained(1, (1.5,), [])]
    monkeypatch.setattr(demo, "_train", lambda workload, plan: trained.pop(0))
    with pytest.raises(ValueError, match="differ from those without"):
        demo.run_demo(Output(), build=lambda: zoo.build("mlp", layers=8, hidden=32, batch=1024))


@pytest.mark.slow
@pytest.mark.nightly
def test_stdout_holds_one_document_even_where_the_target_prints(files):
    command = [
        sys.executable,
        "-m",
        "planner",
        "compare",
        f"{files / 'targets.py'}:talks",
        "--budget",
        "100%",
        "--json",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(json.loads(result.stdout)["rows"]) == 8
    assert "hello from the target" in result.stderr


def test_settings_and_patterns_spread_over_their_values():
    assert spread(["t", "--set", "a=1", "b=2", "--steps", "3"]) == ["t", "--set", "a=1", "--set", "b=2", "--steps", "3"]
    assert spread(["--stages", "h.*", "zoo:mlp"]) == ["--stages", "h.*", "zoo:mlp"]
    assert spread(["--set", "a=1", "b.py:f"]) == ["--set", "a=1", "b.py:f"]
