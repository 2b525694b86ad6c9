"""Profile, solve, train and compare with the zoo's precisions and optimizers, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import zoo
from tests.support.command_line import done, run

TINY = {"layers": 8, "hidden": 16, "batch": 1024}
SETTINGS = ["--set", *(f"{key}={value}" for key, value in TINY.items())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("amp-bf16", "adamw"), ("amp-fp16", "momentum"), ("bf16", "adam"), ("float32", "adafactor")],
)
def test_training_under_a_plan_in_every_precision(precision: str, optimizer: str, tmp_path: Path) -> None:
    own = [*SETTINGS, f"precision={precision}", f"optimizer={optimizer}"]
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    done("profile", "zoo:mlp", *own, "--no-menus", "-o", profile)
    done("solve", profile, "--budget", "85%", "-o", plan)
    document = json.loads(done("train", "zoo:mlp", *own, "--plan", plan, "--steps", "3", "--json").stdout)
    assert document["measured_peak_bytes"] <= document["predicted_peak_bytes"] <= document["budget_bytes"]
    workload = zoo.build("mlp", precision=precision, optimizer=optimizer, **TINY)
    assert document["losses"] == [workload.step() for _ in range(3)]


@pytest.mark.slow
def test_a_plan_is_not_trained_in_another_precision(tmp_path: Path) -> None:
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    done("profile", "zoo:mlp", *SETTINGS, "precision=amp-bf16", "--no-menus", "-o", profile)
    done("solve", profile, "--budget", "100%", "-o", plan)
    result = run("train", "zoo:mlp", *SETTINGS, "--plan", plan)
    assert result.exit_code == 2
    assert "bfloat16" in result.stderr and "profile" in result.stderr


@pytest.mark.slow
def test_compare_measures_every_row_in_the_workloads_own_precision(tmp_path: Path) -> None:
    own = [*SETTINGS, "precision=amp-fp16"]
    document = json.loads(done("compare", "zoo:mlp", *own, "--budget", "85%", "--json").stdout)
    measured = [row for row in document["rows"] if row["measured_peak_bytes"] is not None]
    assert len(measured) > 2
    assert all(row["measured_peak_bytes"] <= row["predicted_peak_bytes"] for row in measured)
