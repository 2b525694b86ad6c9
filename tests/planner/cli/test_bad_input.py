"""Bad input at the command line: exit code 2, what was expected and got, and no half-written file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import planner
from profiler.json_files import write_document
from tests.support.command_line import SMALL, done, refused, run
from tests.support.small_chain import small_chain


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--budget", "85%", "--solver", "rotr"], ["chen_greedy", "rotr"]),
        (["--budget", "lots"], ["8GiB", "lots"]),
        (["--budget", "0"], ["less than one byte"]),
        (["--budget=-5MiB"], ["-5MiB"]),
        (["--budget", "1e3"], ["1e3"]),
        (["--budget", "85%", "--time-limit", "0"], ["--time-limit: ", "0.0"]),
    ],
)
def test_solve_refuses(files, args, words):
    message = refused("solve", files / "profile.json", *args, "-o", files / "refused.json")
    assert all(word in message for word in words)
    assert not (files / "refused.json").exists()


def damaged(source: Path, target: Path, change) -> Path:
    target.write_text(change(source.read_text()))
    return target


def truncated(text: str) -> str:
    return text[: len(text) // 2]


def other_version(text: str) -> str:
    return text.replace('"version": 3', '"version": 99')


def with_nan(text: str) -> str:
    document = json.loads(text)
    document["unplanned_seconds"] = float("nan")
    return json.dumps(document)


def without_stages(text: str) -> str:
    document = json.loads(text)
    del document["stages"]
    return json.dumps(document)


DAMAGES = [
    (truncated, "breaks off"),
    (other_version, "version 3, got 99"),
    (with_nan, "finite"),
    (without_stages, "stages"),
    (lambda text: "[]", "format"),
    (lambda text: "\x00", "no JSON document"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGES)
def test_a_damaged_profile_is_refused(files, tmp_path, change, words):
    broken = damaged(files / "profile.json", tmp_path / "profile.json", change)
    assert words in refused("solve", broken, "--budget", "85%")
    assert words in refused("pareto", broken)
    assert words in refused("show", broken)


@pytest.mark.parametrize(("change", "words"), DAMAGES)
def test_a_damaged_plan_is_refused(files, tmp_path, change, words):
    broken = damaged(files / "plan.json", tmp_path / "plan.json", change)
    assert words in refused("train", "zoo:mlp", *SMALL, "--plan", broken)
    assert words in refused("show", broken)


def test_a_negative_record_is_refused(files, tmp_path):
    document = json.loads((files / "profile.json").read_text())
    document["stages"][1]["kept_bytes"] = -1
    write_document(tmp_path / "profile.json", document)
    assert "kept_bytes" in refused("solve", tmp_path / "profile.json", "--budget", "85%")


@pytest.mark.parametrize("field", ["options", "boundary_bytes", "name"])
def test_a_damaged_chain_is_refused(tmp_path, field):
    document = small_chain().to_dict()
    document["stages"] = [dict(stage) for stage in document["stages"]]
    document["stages"][2][field] = None
    write_document(tmp_path / "chain.json", document)
    assert "chain.json" in refused("solve", tmp_path / "chain.json", "--budget", "85%")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("boundary_bytes", 2**62),
        ("parameter_gradient_bytes", 10**30),
        ("gradient_bytes", -(2**63)),
        ("parcels", [2**61]),
        ("forward_seconds", 1e308),
        ("forward_seconds", 10**400),
    ],
)
def test_a_chain_of_numbers_too_large_to_add_up_is_refused(tmp_path, field, value):
    document = small_chain().to_dict()
    document["stages"] = [{**stage, field: value} for stage in document["stages"]]
    write_document(tmp_path / "chain.json", document)
    for command in (("solve", "--budget", "85%"), ("pareto",)):
        message = refused(command[0], tmp_path / "chain.json", *command[1:])
        assert "chain.json: " in message and ("numbers up to 2**50" in message or "a number in range" in message)


def test_a_plan_is_no_profile_and_a_profile_is_no_plan(files):
    assert "planner-plan" in refused("solve", files / "plan.json", "--budget", "85%")
    assert "planner-profile" in refused("train", "zoo:mlp", "--plan", files / "profile.json")
    assert "nothere.json" in refused("show", files / "nothere.json")


def test_a_plan_of_another_model_is_refused_with_what_differs(files):
    message = refused("train", "zoo:mlp", "--set", "layers=2", "hidden=32", "batch=1024", "--plan", files / "plan.json")
    assert "has no module" in message
    message = refused("train", "zoo:mlp", "--set", "layers=8", "hidden=16", "batch=1024", "--plan", files / "plan.json")
    assert "has shape (16," in message and "expected (32," in message


def test_a_plan_for_another_kind_of_device_is_refused(files, tmp_path):
    text = (files / "plan.json").read_text().replace('"device": "cpu"', '"device": "cuda"')
    (tmp_path / "plan.json").write_text(text)
    assert "the plan is for cuda" in refused("train", "zoo:mlp", *SMALL, "--plan", tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_module_here:build", "No module named"),
        ("{folder}/nothere.py:build", "there is no file"),
        ("{folder}/targets.py:nix", "broken, not_a_number, number, talks"),
        ("{folder}/targets.py:number", "expected a Workload, got int"),
        ("zoo:gpt9", "resnet50"),
        ("nothing", "zoo:NAME"),
    ],
)
def test_a_bad_target_is_refused(files, target, words):
    text = target.format(folder=files)
    assert words in refused("profile", text, "-o", files / "refused.json")
    assert words in refused("compare", text, "--budget", "1GiB")
    assert words in refused("train", text, "--plan", files / "plan.json")
    assert not (files / "refused.json").exists()


def test_a_model_whose_forward_fails_is_refused(files):
    target = f"{files / 'targets.py'}:broken"
    assert "these shapes clash" in refused("profile", target, "-o", files / "refused.json")
    assert "these shapes clash" in refused("compare", target, "--budget", "1GiB")
    assert not (files / "refused.json").exists()


def test_a_model_that_fails_while_training_is_refused(files, monkeypatch):
    def fails(self: planner.Workload) -> torch.Tensor:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("planner.training.training.measure", lambda workload: None)
    monkeypatch.setattr(planner.Workload, "forward", fails)
    message = refused("train", "zoo:mlp", *SMALL, "--plan", files / "plan.json")
    assert "training step 1" in message and "out of luck" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "layers"], "key=value"),
        (["--set", "colour=red"], "colour"),
        (["--device", "abacus"], "abacus"),
        (["--stages", "no.such.*"], "no.such.*"),
    ],
)
def test_profile_refuses_and_leaves_no_file(files, args, words):
    assert words in refused("profile", "zoo:mlp", *args, "-o", files / "refused.json")
    assert not (files / "refused.json").exists()


def test_an_output_folder_that_is_not_there_is_refused_before_any_work(files, tmp_path, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("worked before looking at the output's folder")

    for name in ("cli.profiling.workload_of", "plans.sources.read_source", "plans.profiling.profile"):
        monkeypatch.setattr(f"planner.{name}", never)
    missing = tmp_path / "no" / "folder"
    assert "create it" in refused("profile", "zoo:mlp", "-o", missing / "p.json")
    assert "create it" in refused("solve", files / "profile.json", "--budget", "85%", "-o", missing / "p.json")
    assert "create it" in refused("pareto", files / "profile.json", "-o", missing / "p.csv")
    assert "it is a folder" in refused("profile", "zoo:mlp", "-o", tmp_path)
    assert ".png" in refused("pareto", files / "profile.json", "-o", tmp_path / "curve.txt")


@pytest.mark.parametrize("args", [["frob"], ["solve", "x.json"], ["train", "zoo:mlp"], ["profile"], ["solve", "--no"]])
def test_wrong_usage_exits_2(args):
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == ""


def test_no_half_written_files_are_left(files):
    assert [path.name for path in files.iterdir() if path.name.endswith(".part")] == []


def test_a_device_takes_what_is_written_and_stays_one(files):
    done("solve", files / "profile.json", "--budget", "80%", "-o", os.devnull)
    assert not os.path.isfile(os.devnull)


def test_a_file_name_that_no_folder_takes_is_refused(files, tmp_path):
    assert "the name is too long for the file system" in refused(
        "solve", files / "profile.json", "--budget", "80%", "-o", tmp_path / ("x" * 300)
    )


def test_options_that_a_kind_of_profile_does_not_have_are_refused():
    simulated = ["advise", "zoo:mlp", "--world-size", "2", "--shard", "ddp", "--batch-key", "rows"]
    assert "--batch-key: the batch of simulated ranks is not split" in refused(*simulated)
