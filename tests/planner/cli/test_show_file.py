"""The show command: tables, pictures and CSV files of plans, predicted and measured, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.explain import peak, timeline
from planner.units import format_bytes
from profiler.json_files import write_document
from tests.support.command_line import done, refused
from tests.support.small_chain import small_chain


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def peaks_of(path: Path) -> dict[str, int]:
    """The highest point of every series."""
    found: dict[str, int] = {}
    for row in rows_of(path):
        found[row["series"]] = max(found.get(row["series"], 0), int(row["bytes_peak"]))
    return found


def sums_of(parts: list[dict[str, Any]]) -> dict[str, int]:
    """What the parts of every peak add up to."""
    found: dict[str, int] = {}
    for row in parts:
        found[row["series"]] = found.get(row["series"], 0) + int(row["bytes"])
    return found


@pytest.fixture(scope="module")
def plan(files) -> planner.Plan:
    return planner.Plan.load(files / "plan.json")


@pytest.fixture
def old(files, tmp_path):
    """A plan file of a release that knew neither menus nor chains."""
    document = json.loads((files / "plan.json").read_text())
    for stage in document["stages"]:
        del stage["option"], stage["record"]["menu"]
    for action in document["schedule"]:  # kind, stage, option
        action[2:] = [min(option, 0) if isinstance(option, int) else option for option in action[2:]]
    write_document(
        tmp_path / "old.json", {k: v for k, v in document.items() if k not in ("chain", "resident", "menus")}
    )
    return tmp_path / "old.json"


def test_a_plan_is_printed_with_its_ops_and_its_peak(files, plan) -> None:
    text = done("show", files / "plan.json").stdout
    solved = done("solve", files / "profile.json", "--budget", "85%").stdout
    both = set(text.splitlines()) & set(solved.splitlines())
    assert any(line.startswith("predicted peak") for line in both)
    assert not any(line.startswith(("resident", "recomputed", "solver")) for line in text.splitlines())
    assert f"Peak, predicted: {format_bytes(plan.predicted_peak_bytes)}" in text
    assert max(map(len, text.splitlines())) <= 100
    every = done("show", files / "plan.json", "--ops").stdout
    assert "Ops, per kind of stage" in every
    assert every.count("held anyway") > text.count("held anyway")


def test_the_predicted_timeline_is_drawn_from_the_plan_alone(files, plan, tmp_path) -> None:
    outputs = {name: tmp_path / name for name in ("t.png", "t.csv")}
    printed = done(
        "show", files / "plan.json", "-o", outputs["t.png"], "-o", outputs["t.csv"], "--json",
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.png"]
    assert outputs["t.png"].read_bytes().startswith(b"\x89PNG")
    rows = rows_of(outputs["t.csv"])
    assert tuple(rows[0]) == timeline.COLUMNS
    assert peaks_of(outputs["t.csv"]) == {
        "predicted_planned": plan.predicted_peak_bytes, "predicted_unplanned": plan.unplanned_peak_bytes,
    }  # fmt: skip
    phases = [row["phase"] for row in rows if row["series"] == "predicted_planned"]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "optimizer"]
    parts = json.loads(printed.stdout)["alive_at_peak"]
    assert tuple(parts[0]) == peak.COLUMNS
    assert sums_of(parts) == {"predicted": plan.predicted_peak_bytes}


@pytest.mark.slow
def test_the_measured_timelines_come_beside_the_predicted_ones(files, plan, tmp_path) -> None:
    show = ("show", files / "plan.json", "-o", tmp_path / "t.csv", "-o", tmp_path / "t.svg", "--measure")
    result = done(*show)
    peaks = peaks_of(tmp_path / "t.csv")
    assert set(peaks) == {f"{s}_{p}" for s in ("predicted", "measured") for p in ("planned", "unplanned")}
    assert peaks["measured_planned"] == peaks["predicted_planned"]
    assert peaks["measured_unplanned"] == peaks["predicted_unplanned"]
    assert sums_of(json.loads(done(*show, "--json").stdout)["alive_at_peak"]) == {
        "predicted": plan.predicted_peak_bytes, "measured": peaks["measured_planned"],
    }  # fmt: skip
    assert "Peak, measured" in result.stdout and "peak with the plan" in result.stdout


def test_a_plan_for_cuda_is_shown_on_a_machine_without(files, plan, tmp_path) -> None:
    document = json.loads((files / "plan.json").read_text())
    write_document(tmp_path / "cuda.json", {**document, "device": "cuda:0"})
    text = done("show", tmp_path / "cuda.json", "-o", tmp_path / "t.png").stdout
    assert "on cuda:0" in text
    message = refused("show", tmp_path / "cuda.json", "--measure")
    assert "the plan is for cuda" in message


def test_an_old_plan_is_printed_and_says_why_its_peak_is_not_explained(old) -> None:
    result = done("show", old)
    assert "Plan of Sequential" in result.stdout and "Peak, predicted" not in result.stdout
    assert "older release without the chain" in result.stderr
    for name in ("t.png", "t.csv"):
        message = refused("show", old, "-o", old.parent / name)
        assert "an older release lacks the chain" in message and "solve the profile again" in message
    assert [path.name for path in old.parent.iterdir()] == ["old.json"]


def test_the_solution_of_a_chain_has_a_timeline_too(tmp_path) -> None:
    write_document(tmp_path / "chain.json", small_chain().to_dict())
    solution = tmp_path / "solution.json"
    done("solve", tmp_path / "chain.json", "--budget", "60%", "--solver", "rotor", "-o", solution)
    text = done("show", solution, "-o", tmp_path / "t.csv", "-o", tmp_path / "t.png").stdout
    document = json.loads(solution.read_text())
    peaks = peaks_of(tmp_path / "t.csv")
    assert peaks["predicted_planned"] == document["predicted_peak_bytes"]
    assert peaks["predicted_unplanned"] == document["unplanned_peak_bytes"]
    assert "Peak, predicted" in text
    assert "the solution of a chain problem" in refused("show", solution, "--ops")
    assert "the solution of a chain problem" in refused("show", solution, "--measure", "zoo:mlp")
    write_document(solution, {k: v for k, v in document.items() if k != "chain"})
    assert "Solution of a chain" in done("show", solution).stdout
    assert "lacks the chain" in refused("show", solution, "-o", tmp_path / "t.csv")
    write_document(solution, {**document, "chain": 3})
    assert "expected a chain and a schedule" in refused("show", solution)


def test_what_has_no_timeline_is_refused(files, tmp_path) -> None:
    assert "has no ops, timeline or page" in refused("show", files / "profile.json", "-o", tmp_path / "t.png")
    assert "has no ops, timeline or page" in refused("show", files / "profile.json", "--ops")
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_cannot_be_written_are_refused_first(files, tmp_path) -> None:
    assert "ending in .html, .png" in refused("show", files / "plan.json", "-o", tmp_path / "t.jpg")
    assert "there is no folder" in refused("show", files / "plan.json", "-o", tmp_path / "no" / "t.csv")
    assert "it is a folder" in refused("show", files / "plan.json", "-o", tmp_path)


OTHERS = """
from planner import zoo

def narrow():
    return zoo.build("mlp", layers=8, hidden=16, batch=1024)

def short():
    return zoo.build("mlp", layers=8, hidden=32, batch=9)
"""


def test_another_model_and_another_batch_are_refused(files, tmp_path) -> None:
    plan, others = files / "plan.json", tmp_path / "others.py"
    others.write_text(OTHERS)
    assert "differs" in refused("show", plan, "--measure", f"{others}:narrow")
    assert "the batch has other shapes" in refused("show", plan, "--measure", f"{others}:short")
    assert "expected one of" in refused("show", plan, "--measure", "zoo:nothing")


@pytest.mark.parametrize("field", ["kind", "kept_bytes", "runs"])
def test_a_stage_of_a_chain_s_solution_lacks_nothing(tmp_path, field) -> None:
    write_document(tmp_path / "chain.json", small_chain().to_dict())
    done("solve", tmp_path / "chain.json", "--budget", "60%", "--solver", "rotor", "-o", tmp_path / "solution.json")
    document = json.loads((tmp_path / "solution.json").read_text())
    del document["stages"][1][field]
    write_document(tmp_path / "solution.json", document)
    message = refused("show", tmp_path / "solution.json")
    assert "solution.json: expected" in message and field in message and "solve again" in message


ODD = "[/]:smile:[bold red]$x^$"


def test_what_others_call_their_modules_is_text(files, tmp_path):
    document = json.loads((files / "plan.json").read_text())
    name = next(s["record"]["name"] for s in document["stages"] if s["record"]["kind"] == "stage")
    odd = json.dumps({**document, "model_class": ODD}).replace(f'"{name}"', json.dumps(ODD))
    (tmp_path / "plan.json").write_text(odd)
    text = done("show", tmp_path / "plan.json", "--ops", "-o", tmp_path / "t.png", "-o", tmp_path / "t.csv")
    assert f"Plan of {ODD}" in text.stdout and text.stdout.count(ODD) > 2
    assert ODD in {row["stage"] for row in rows_of(tmp_path / "t.csv")}
    (tmp_path / "plan.json").write_text(odd.replace("smile", "\\u001b[31m"))
    assert "plain characters" in refused("show", tmp_path / "plan.json")
