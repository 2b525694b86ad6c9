"""Blocks that cannot run again are named with the remedy: by the profile, the plan, a refusal, and the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import planner
from planner.plans.refusals import blocks_in_words
from tests.support.blocked_models import blocked_workload
from tests.support.command_line import run

BLOCKS = tuple(f"h.{k}" for k in range(6))
CASES = [
    ("python", BLOCKS, "Residual", "draws from Python's or numpy's random generator", "draw with torch.rand"),
    ("python_inside", BLOCKS, "ScaledInside", "numpy's random generator, in its scaled", "draw with torch.rand"),
    ("numpy", BLOCKS, "Residual", "draws from Python's or numpy's random generator", "draw with torch.rand"),
    ("in_place", BLOCKS, "InPlace", "changes its input in place", "write the result into a new tensor"),
    (
        "penalty",
        ("critic",),
        "Blocks",
        "goes backward through it",
        "compute it in a step of its own",
    ),
    (
        "use_cache",
        tuple(f"transformer.h.{k}" for k in range(4)),
        "GPT2Block",
        "puts tensors into a DynamicCache",
        "pass no cache (use_cache=False)",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("habit", "names", "module_class", "reason", "remedy"), CASES, ids=[case[0] for case in CASES])
def test_the_block_the_reason_and_the_remedy_are_named(
    habit: str, names: tuple[str, ...], module_class: str, reason: str, remedy: str, tmp_path: Path
) -> None:
    profile = planner.profile(blocked_workload(habit), menus=False)
    (record,) = profile.left_out
    assert (record.names, record.module_class) == (names, module_class)
    assert reason in record.reason and remedy in record.remedy
    assert record.kept_bytes > 0
    profile.save(tmp_path / "profile.json")
    assert planner.Profile.load(tmp_path / "profile.json") == profile

    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, _least_bytes(profile) - 1, solver="rotor")
    said = str(caught.value)
    assert f"{blocks_in_words(record)} cannot run again: " in said
    assert reason in said and remedy in said and "make the batch smaller" not in said
    assert caught.value.left_out == (record,)

    plan = planner.solve(profile, "100%", solver="rotor")
    plan.save(tmp_path / "plan.json")
    assert planner.Plan.load(tmp_path / "plan.json").left_out == (record,)

    for file in ("profile.json", "plan.json"):
        shown = " ".join(run("show", str(tmp_path / file)).stdout.split())
        assert reason in shown and "remedy: " in shown and remedy in shown
    solve = ["solve", str(tmp_path / "profile.json"), "--solver", "rotor", "--json"]
    document = json.loads(run(*solve, "--budget", "100%").stdout)
    assert document["left_out"] == [json.loads(json.dumps(dataclasses.asdict(record)))]
    refused = run(*solve, "--budget", "1KiB")
    assert refused.exit_code == 3 and "left_out" in json.loads(refused.stdout)


@pytest.mark.slow
def test_nothing_is_named_where_every_block_can_run_again() -> None:
    profile = planner.profile(blocked_workload("plain"), menus=False)
    assert profile.left_out == ()
    with pytest.raises(planner.Infeasible, match="make the batch smaller") as caught:
        planner.solve(profile, _least_bytes(profile) - 1, solver="rotor")
    assert caught.value.left_out == ()


@pytest.mark.slow
def test_the_remedy_helps() -> None:
    """With the cache off, whole blocks are stages, and a smaller budget is enough."""
    before = planner.profile(blocked_workload("use_cache"), menus=False)
    work = blocked_workload("use_cache")
    work.inputs["use_cache"] = False
    after = planner.profile(work, menus=False)
    assert after.left_out == ()
    assert {f"transformer.h.{k}" for k in range(4)} <= {stage.name for stage in after.stages}
    assert _least_bytes(after) < 0.9 * _least_bytes(before)


@pytest.mark.slow
def test_named_stages_that_cannot_run_again_are_named_too() -> None:
    """Stages that a person names stand in the table themselves; plans and refusals name them as well."""
    profile = planner.profile(blocked_workload("python"), stages=["h.*"], menus=False)
    assert profile.left_out == ()
    plan = planner.solve(profile, "100%", solver="rotor")
    (record,) = plan.left_out
    assert record.names == BLOCKS and "draw with torch.rand" in record.remedy


def _least_bytes(profile: planner.Profile) -> int:
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1, solver="rotor")
    return caught.value.minimum_budget_bytes
