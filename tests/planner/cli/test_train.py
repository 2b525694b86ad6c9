"""``planner train --retry``: what a person and a program are told where the device is smaller than the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import planner
from planner.training import training
from tests.support.command_line import SMALL, done, run
from tests.support.small_device import Limit

TRAIN = ("train", "zoo:mlp", *SMALL, "--steps", "2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    done("profile", "zoo:mlp", *SMALL, "--no-menus", "-o", folder / "profile.json")
    done("solve", folder / "profile.json", "--budget", "100%", "-o", folder / "plan.json")
    return folder


@pytest.fixture(scope="module")
def needed(files) -> tuple[int, list[float]]:
    """Bytes that the command allocates at most under the plan, copies in host memory included; the losses."""
    with Limit(2**60) as roomy:
        document = json.loads(done(*TRAIN, "--plan", files / "plan.json", "--json").stdout)
    assert (document["status"], document["retries"], document["out_of_memory"]) == ("trained", 0, [])
    return roomy.peak_bytes, document["losses"]


def train(files: Path, limit_bytes: float, *args: str | Path):
    with Limit(int(limit_bytes)):
        return run(*TRAIN, "--plan", files / "plan.json", *args)


@pytest.mark.slow
def test_a_program_reads_each_failure_and_the_same_losses(files, needed, tmp_path):
    peak_bytes, losses = needed
    result = train(files, 0.8 * peak_bytes, "--retry", "5", "--json", "-o", tmp_path / "smaller.json")
    assert result.exit_code == 0, result.output
    assert "written: " in result.stderr
    document = json.loads(result.stdout)
    failures = document["out_of_memory"]
    assert document["status"] == "trained" and document["losses"] == losses
    assert 1 <= document["retries"] == len(failures) <= 5
    first = failures[0]
    assert (first["step"], first["restored"], first["repeated"]) == (1, True, True)
    assert first["phase"] in ("forward", "backward") and first["stage"]
    assert first["actual_bytes"] <= first["predicted_bytes"] < first["actual_bytes"] + peak_bytes
    assert first["allocation_bytes"] > 0
    budgets = [failure["budget_bytes"] for failure in failures] + [document["budget_bytes"]]
    assert budgets[1:] == [failure["next_budget_bytes"] for failure in failures]
    assert budgets == sorted(budgets, reverse=True)
    assert document["measured_peak_bytes"] <= document["budget_bytes"]
    saved = planner.Plan.load(tmp_path / "smaller.json")
    assert (saved.budget_bytes, saved.predicted_peak_bytes) == (budgets[-1], document["predicted_peak_bytes"])
    with Limit(int(0.8 * peak_bytes)):  # the plan that was saved fits at once
        again = json.loads(done(*TRAIN, "--plan", tmp_path / "smaller.json", "--json").stdout)
    assert (again["retries"], again["losses"]) == (0, losses)


@pytest.mark.slow
def test_a_person_reads_where_it_was_and_what_comes_next(files, needed):
    result = train(files, 0.8 * needed[0], "--retry")
    assert result.exit_code == 0
    assert re.search("out of memory: step 1, (forward|backward) of '", result.stderr)
    for words in ("really alive there", "predicted there", "was refused", "the last actions", "nothing was lost"):
        assert words in result.stderr
    assert "trying again with a plan for " in result.stderr
    assert "-o FILE writes it" in result.stdout and "planner solve PROFILE --budget " in result.stdout


def test_without_retry_it_ends_with_3_and_says_what_to_do(files, needed, tmp_path):
    saved = tmp_path / "never.json"
    result = train(files, 0.8 * needed[0], "--json", "-o", saved)
    assert result.exit_code == 3 and not saved.exists() and "Traceback" not in result.output
    assert f"not written: {saved}: no plan came to the end of training" in " ".join(result.stderr.split())
    document = json.loads(result.stdout)
    assert (document["status"], document["retries"], document["losses"]) == ("out_of_memory", 0, [])
    assert document["measured_peak_bytes"] is None
    (failure,) = document["out_of_memory"]
    assert failure["next_budget_bytes"] is None
    assert "--retry N" in failure["why_not"] and failure["why_not"] in result.stderr
    named = failure["why_not"].split("--budget ")[1].split()[0]
    done("solve", files / "profile.json", "--budget", named, "-o", tmp_path / "next.json")
    assert planner.Plan.load(tmp_path / "next.json").predicted_peak_bytes < failure["predicted_peak_bytes"]


@pytest.mark.slow
def test_a_device_that_no_plan_fits_ends_with_3_after_the_smallest(files, needed):
    result = train(files, 0.3 * needed[0], "--retry", "9", "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    failures = document["out_of_memory"]
    assert document["status"] == "out_of_memory" and document["retries"] == len(failures) - 1 >= 1
    assert failures[-1]["why_not"].startswith("no plan needs less: ") and "planner advise" in failures[-1]["why_not"]
    assert document["budget_bytes"] == failures[-1]["budget_bytes"]


def test_a_file_that_cannot_be_written_is_refused_before_training(files, tmp_path):
    result = run(*TRAIN, "--plan", files / "plan.json", "-o", tmp_path / "nowhere" / "plan.json")
    assert result.exit_code == 2 and "nowhere" in result.stderr


@pytest.mark.slow
def test_of_several_ranks_one_says_that_it_has_no_room_and_runs_no_step_again(files, needed, monkeypatch):
    monkeypatch.setattr(training, "current_ranks", lambda: SimpleNamespace(rank=1))
    result = train(files, 0.8 * needed[0], "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert (document["status"], document["losses"]) == ("out_of_memory", []) and "rank 1" in document["message"]
    assert "out of memory: " in result.stderr and "ran out of memory in training step" in result.stderr
    assert "rank 1 ran out of memory" in result.stderr
    refusal = train(files, 2 * needed[0], "--retry", "2")
    assert refusal.exit_code == 2 and "--retry: several ranks cannot retry" in refusal.stderr


def test_training_says_losses_on_stderr_of_many_steps_every_kth(files, monkeypatch):
    monkeypatch.setattr("planner.cli.train.LOSSES_SAID", 2)
    ran = done("train", "zoo:mlp", *SMALL, "--plan", files / "plan.json", "--steps", "5", "--json")
    losses = json.loads(ran.stdout)["losses"]
    said = [line for line in ran.stderr.splitlines() if line.startswith("step ")]
    assert said == [f"step {k} of 5: loss {losses[k - 1]:.6g}" for k in (1, 2, 4, 5)]
