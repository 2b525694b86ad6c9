"""Where a profile goes that is given no file: never over anything but a profile of the same."""

from __future__ import annotations

import json

import pytest

import planner
from planner.cli.profiling import profile_file
from profiler.target_record import TargetRecord
from tests.support.command_line import done, refused

TINY = ("--set", "layers=2", "hidden=8", "batch=4")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("zoo:gpt2", "gpt2.profile.json"),
        ("models/my model.py:build", "my_model-build.profile.json"),
        ("package.models:build", "models-build.profile.json"),
    ],
)
def test_files_are_named_after_the_target(text, name):
    assert str(profile_file(TargetRecord(text=text))) == name


def test_a_profile_of_the_same_is_overwritten_and_of_anything_else_is_not(tmp_path):
    first = done("profile", "zoo:mlp", *TINY, "--no-menus")
    assert "written: mlp.profile.json" in first.stderr
    done("profile", "zoo:mlp", *TINY, "--no-menus")
    assert [path.name for path in tmp_path.iterdir()] == ["mlp.profile.json"]
    written = (tmp_path / "mlp.profile.json").read_bytes()
    (tmp_path / "mlp-2.profile.json").write_text("notes")
    other = done("profile", "zoo:mlp", *TINY, "seed=1", "--no-menus")
    assert "written: mlp-3.profile.json" in other.stderr
    assert (tmp_path / "mlp.profile.json").read_bytes() == written
    assert (tmp_path / "mlp-2.profile.json").read_text() == "notes"


def test_nothing_is_written_where_profiling_is_refused(tmp_path):
    refused("profile", "zoo:mlp", "--set", "layers=zero")
    assert [*tmp_path.iterdir()] == []


def test_json_has_the_stages_and_names_the_file(tmp_path):
    document = json.loads(done("profile", "zoo:mlp", *TINY, "--no-menus", "--json", "--ops").stdout)
    profile = planner.Profile.load(tmp_path / document["file"])
    assert document["unplanned_peak_bytes"] == profile.unplanned_peak_bytes
    assert [stage["name"] for stage in document["stages"]] == [stage.name for stage in profile.stages]
    assert len(document["op_records"]) == len(profile.op_records)
    assert document["target"]["text"] == "zoo:mlp" and document["resident_bytes"] == profile.resident.total
