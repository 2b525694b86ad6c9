"""Whole-graph profiles at the command line: profiled, solved, shown, drawn, and refused in words."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import planner
from tests.support.command_line import done, refused

SIZES = ["--set", "layers=6", "hidden=64", "batch=256"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "profile.json"
    said = done("profile", "zoo:mlp", *SIZES, "--graph", "-o", path).stdout
    assert "op by op" in said and "addmm" in said and "ops forward" in said
    return path


def test_a_profile_is_solved_shown_and_drawn(profile: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    document = json.loads(done("solve", profile, "--budget", "90%", "-o", plan, "--json", "--gap", "0.01").stdout)
    loaded = planner.GraphPlan.load(plan)
    assert document["predicted_peak_bytes"] == loaded.predicted_peak_bytes <= document["budget_bytes"]
    assert json.loads(plan.read_text())["kind"] == "graph"
    runs = {stage["name"]: stage["runs"] for stage in document["stages"]}
    assert sum(runs.values()) - len(runs) == loaded.recomputed_ops > 0
    options = ["--timeline", tmp_path / "step.svg", "--csv", tmp_path / "step.csv", "--peak-csv", tmp_path / "peak.csv"]
    said = done("show", plan, "--ops", *options).stdout
    assert "Run again" in said and "Peak, predicted" in said and "kept from forward" in said
    spans = [*csv.DictReader((tmp_path / "step.csv").open())]
    assert max(int(row["bytes_peak"]) for row in spans if row["series"] == "predicted_planned") == (
        loaded.predicted_peak_bytes
    )
    parts = [*csv.DictReader((tmp_path / "peak.csv").open())]
    assert sum(int(row["bytes"]) for row in parts) == loaded.predicted_peak_bytes
    assert (tmp_path / "step.svg").stat().st_size > 1000
    assert "--measure, got one of single ops" in refused("show", plan, "--measure", "zoo:mlp")
    assert "op by op" in done("show", profile).stdout
    done("pareto", profile, "--csv", tmp_path / "curves.csv", "--time-limit", "3")
    with (tmp_path / "curves.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert {"none", "auto", "lower_bound"} <= {row["solver"] for row in rows}
    assert all(float(row["peak_bytes"]) <= float(row["budget_bytes"]) for row in rows if row["peak_bytes"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--offload-only"], "offload: expected a link over which something can be sent"),
        (["--no-menus"], "--no-menus: expected a profile of stages alone"),
    ],
)
def test_options_about_stages_are_refused(profile: Path, options: list[str], said: str) -> None:
    assert said in refused("solve", profile, "--budget", "90%", *options)


def test_rules_name_ops(profile: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text('{"rules": [{"modules": "*", "ops": "relu"}]}')
    assert "recompute relu in *" in done("solve", profile, "--rules", rules).output
    rules.write_text('{"checkpoints": ["*"]}')
    assert "about checkpoints" in refused("solve", profile, "--rules", rules)


def test_values_go_to_host_memory_over_a_link_that_is_given(profile: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    options = ("--budget", "90%", "--link-gbps", "1", "--time-limit", "2")
    assert "on the host at once" in done("solve", profile, *options, "-o", plan).stdout
    loaded = planner.GraphPlan.load(plan)
    sent_bytes = sum(loaded.graph.storages[copy.storage].size_bytes for copy in loaded.copies if copy.kind == "send")
    document = json.loads(done("solve", profile, *options, "--json").stdout)
    assert document["host_bytes"] == loaded.host_bytes <= sent_bytes > 0
    assert sum(stage["offloaded_bytes"] for stage in document["stages"]) == sent_bytes
    assert document["link"]["to_host_bytes_per_second"] == 1e9
    assert "on the host at once" in done("show", plan).stdout
    without = json.loads(done("solve", profile, *options, "--no-offload", "--json").stdout)
    assert without["host_bytes"] == 0 and without["link"] is None


def test_profiles_of_stages_and_of_a_graph_are_asked_for_apart() -> None:
    assert "--graph: expected it without" in refused("profile", "zoo:mlp", "--graph", "--ops")
