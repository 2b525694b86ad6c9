"""Training under plans of single ops, from files and from budgets; what is about stages alone is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import planner
import planner.zoo
from planner.training import training
from tests.support.command_line import done, refused, run
from tests.support.small_device import Limit

SIZES = ["--set", "layers=6", "hidden=64", "batch=256"]
TRAIN = ("train", "zoo:mlp", *SIZES, "--steps", "2")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    done("profile", "zoo:mlp", *SIZES, "--graph", "-o", folder / "profile.json")
    done("solve", folder / "profile.json", "--budget", "90%", "--gap", "0.01", "-o", folder / "plan.json")
    return folder


def test_a_plan_trains_within_its_budget_as_predicted(files: Path) -> None:
    document = json.loads(done(*TRAIN, "--plan", files / "plan.json", "--json").stdout)
    assert document["measured_peak_bytes"] == document["predicted_peak_bytes"] <= document["budget_bytes"]
    assert document["measured_seconds"] > 0 and document["predicted_seconds"] > 0
    losses = json.loads(done(*TRAIN, "--budget", "100%", "--graph", "--json").stdout)["losses"]
    assert document["losses"] == pytest.approx(losses, rel=1e-6) and len(losses) == 2
    said = done(*TRAIN, "--plan", files / "plan.json").stdout
    assert "measured peak" in said and "within the budget" in said


def test_inductor_compiles_a_plan_and_trains_to_the_same_losses(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(training, "apply", _noting(made, training.apply))
    eager, compiled = (
        json.loads(done(*TRAIN, "--plan", files / "plan.json", "--backend", each, "--json").stdout)
        for each in ("eager", "inductor")
    )
    assert made == ["eager", "inductor"]
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-5) and compiled["measured_peak_bytes"] > 0


def _noting(made: list[str], apply: Any) -> Any:
    def noted(model: Any, plan: Any, *, backend: str) -> Any:
        made.append(backend)
        return apply(model, plan, backend=backend)

    return noted


def test_a_budget_is_profiled_and_solved_for(tmp_path: Path) -> None:
    for options, kind in [(["--graph"], planner.GraphPlan), ([], planner.Plan)]:
        done(*TRAIN, "--budget", "90%", *options, "--save-plan", tmp_path / "plan.json")
        assert kind.load(tmp_path / "plan.json").budget_bytes
    refusal = run(*TRAIN, "--budget", "100000", "--graph")
    assert refusal.exit_code == 3 and "expected at least" in refusal.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--plan, --budget: expected one of them, got neither"),
        (["--plan", "plan.json", "--budget", "90%"], "--plan, --budget: expected one of them, got both"),
        (["--plan", "plan.json", "--graph"], "--graph: expected it with --budget, got --plan"),
        (["--plan", "plan.json", "--retry"], "--retry: expected a plan of stages"),
        (["--plan", "profile.json"], "expected a file of format planner-plan"),
        (["--budget", "90%", "--backend", "inductor"], "--backend: expected a plan of single ops, got one of stages"),
        (["--plan", "plan.json", "--backend", "xla"], "--backend: expected eager or inductor, got 'xla'"),
    ],
)
def test_what_does_not_go_together_is_refused(files: Path, options: list[str], said: str) -> None:
    given = [str(files / option) if option.endswith(".json") else option for option in options]
    assert said in refused(*TRAIN, *given)
    assert "--verify: expected a profile of stages" in refused(
        "solve", files / "profile.json", "--budget", "90%", "--verify", "zoo:mlp"
    )


def test_where_memory_runs_out_it_is_said_with_the_next_budget(files: Path) -> None:
    plan = planner.GraphPlan.load(files / "plan.json")
    with Limit(plan.predicted_peak_bytes // 2):
        result = run(*TRAIN, "--plan", files / "plan.json", "--json")
    assert result.exit_code == 3 and "Traceback" not in result.output
    document = json.loads(result.stdout)
    assert document["status"] == "out_of_memory" and document["out_of_memory"][0]["step"] == 1
    assert "planner solve PROFILE --budget" in result.stderr and "--retry" not in result.stderr


@pytest.mark.slow
def test_single_ops_are_compared_beside_stages() -> None:
    document = json.loads(done("compare", "zoo:mlp", *SIZES, "--budget", "95%", "--graph", "--json").stdout)
    rows = {row["solver"]: row for row in document["rows"]}
    first, *_, last = rows
    assert (first, last) == ("none", "single ops") and "rotor" in rows
    ops = rows["single ops"]
    assert ops["predicted_peak_bytes"] == ops["measured_peak_bytes"] <= document["budget_bytes"]
    assert ops["measured_seconds"] > 0


def test_one_call_plans_single_ops() -> None:
    work = planner.zoo.build("mlp", layers=6, hidden=64, batch=256)
    described: dict[str, Any] = {"loss": work.loss, "optimizer": work.optimizer}
    planner.auto_checkpoint(work.model, work.inputs, budget="90%", graph=True, **described)
    handle = planner.handle_of(work.model)
    assert handle is not None and isinstance(handle.plan, planner.GraphPlan)
    assert planner.measure(work, repeats=1).peak_bytes == handle.plan.predicted_peak_bytes
    wrongs: list[dict[str, Any]] = [{"dynamic": True}, {"stages": ["*"]}, {"offload": "only"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="expected graph=True without dynamic, stages and offload"):
            planner.auto_checkpoint(work.model, work.inputs, budget="90%", graph=True, **wrong)


def test_a_profile_is_no_plan(files: Path) -> None:
    profile = planner.GraphProfile.load(files / "profile.json")
    with pytest.raises(ValueError, match="solve it first"):
        planner.apply(torch.nn.Linear(2, 2), profile)  # type: ignore[arg-type]
