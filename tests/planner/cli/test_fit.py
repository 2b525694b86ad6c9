"""``planner fit``: from a target to steps under a plan in one command, and the files that it leaves."""

from __future__ import annotations

import json

import pytest

import planner
from planner.units import exact_bytes
from tests.support.command_line import done, refused, run

FIT = ("fit", "zoo:mlp", "--set", "layers=6", "hidden=16", "batch=64")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_it_says_what_was_predicted_and_measured_and_leaves_files_that_train_alike(tmp_path):
    document = json.loads(done(*FIT, "--budget", "90%", "--steps", "2", "--json").stdout)
    plan = planner.Plan.load(document["plan"])
    profile = planner.Profile.load(document["profile"])
    assert (document["plan"], document["profile"]) == ("mlp.plan.json", "mlp.profile.json")
    assert plan.profile_fingerprint == profile.fingerprint and plan.target == profile.target
    assert document["measured_peak_bytes"] <= document["budget_bytes"] == 9 * profile.unplanned_peak_bytes // 10
    assert document["predicted_peak_bytes"] == plan.predicted_peak_bytes < profile.unplanned_peak_bytes
    again = json.loads(done("train", "--plan", document["plan"], "--steps", "2", "--json").stdout)
    assert again["losses"] == document["losses"] and len(again["losses"]) == 2


def test_a_person_reads_the_answer_in_one_sentence(tmp_path):
    (tmp_path / "files").mkdir()
    said = done(*FIT, "--budget", "100%", "--steps", "1", "-o", "files")
    plan = planner.Plan.load(tmp_path / "files" / "mlp.plan.json")
    assert f"unplanned peak  {exact_bytes(plan.unplanned_peak_bytes)}" in said.stdout
    assert said.stdout.splitlines()[-1].startswith("zoo:mlp trains within ")
    assert "written: files/mlp.profile.json" in said.stderr and "written: files/mlp.plan.json" in said.stderr


def test_where_nothing_fits_the_profile_is_kept_and_the_smallest_budget_is_said(tmp_path):
    result = run(*FIT, "--budget", "1KiB", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 3 and document["status"] == "infeasible"
    assert [path.name for path in tmp_path.iterdir()] == [document["profile"]] == ["mlp.profile.json"]
    done("solve", document["profile"], "--budget", str(document["minimum_budget_bytes"]))


@pytest.mark.parametrize(
    "args", [("--budget", "much"), ("--budget", "1GiB", "--headroom", "x"), ("--budget", "60%", "-o", "no")]
)
def test_wrong_input_is_refused_before_anything_is_measured(tmp_path, args):
    refused(*FIT, *args)
    assert [*tmp_path.iterdir()] == []
