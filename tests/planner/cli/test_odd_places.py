"""Output to places that are full, narrow or gone: a sentence with a remedy, no traceback, and nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.cli.output import Output
from planner.explain.tables import plain_table
from tests.support.command_line import done, refused, run

ROOT = Path(__file__).parents[3]
PROBLEM = ("solve", ROOT / "benchmarks" / "problems" / "vgg16-99.json", "--budget", "100%")


def shelled(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of a shell, in which ``planner`` is the command; PROBLEM in it is ``solve`` of a graph."""
    problem = " ".join(map(str, PROBLEM))
    line = line.replace("PROBLEM", problem).replace("planner", f"{sys.executable} -m planner", 1)
    more = {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(["sh", "-c", line], cwd=folder, env={**os.environ, **more}, capture_output=True, check=False)


@pytest.mark.parametrize("columns", range(1, 12))
def test_tables_end_in_any_width(capsys: pytest.CaptureFixture[str], monkeypatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = plain_table("a title of some words", ["name", "what it is"], ["bytes"])
    table.add_row("transformer.h.10", "kept", "1,024")
    Output().show(table)
    assert "1,024" in capsys.readouterr().out.replace("\n", "")


def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path: Path) -> None:
    ran = shelled("ulimit -f 8; planner PROBLEM -o plan.json --json", tmp_path)
    assert ran.returncode == 2 and b"Traceback" not in ran.stderr
    said = json.loads(ran.stdout)
    assert said["status"] == "error" and "expected room to write it, got File too large; make room" in said["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
@pytest.mark.parametrize("options", ["", " --json"])
def test_a_full_standard_output_is_said(tmp_path: Path, options: str) -> None:
    ran = shelled(f"planner PROBLEM{options} > /dev/full", tmp_path)
    assert ran.returncode == 2 and b"Traceback" not in ran.stderr
    assert b"standard output: expected a place that can be written to, got No space left on device" in ran.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_an_encoding_lacks_does_not_lose_the_result(tmp_path: Path, encoding: str) -> None:
    ran = shelled("planner PROBLEM", tmp_path, PYTHONIOENCODING=encoding)
    assert ran.returncode == 0 and b"predicted peak" in ran.stdout


def test_a_closed_standard_input_is_said(tmp_path: Path) -> None:
    ran = shelled("planner show - <&-", tmp_path)
    assert ran.returncode == 2 and b"standard input: it is closed" in ran.stderr


def test_a_name_that_cannot_be_is_refused_before_the_work(tmp_path: Path) -> None:
    profile = ("profile", "zoo:mlp", "--set", "layers=2", "hidden=8", "-o", tmp_path / f"{'a' * 300}.json")
    text = refused(*profile)
    assert "the name is too long for the file system; choose a shorter one" in text
    assert run(*profile).stderr.startswith("error: ")  # No progress before.
    assert list(tmp_path.iterdir()) == []


def test_a_name_as_long_as_can_be_is_written(tmp_path: Path) -> None:
    done(*PROBLEM, "-o", tmp_path / f"{'a' * 250}.json")
    assert [len(path.name) for path in tmp_path.iterdir()] == [255]


def test_a_file_from_an_editor_that_marks_its_encoding_is_read(tmp_path: Path) -> None:
    marked = tmp_path / "marked.json"
    marked.write_text(PROBLEM[1].read_text(), encoding="utf-8-sig")
    done("solve", marked, "--budget", "100%")


@pytest.mark.parametrize(
    ("text", "said"),
    [("{} {}", "got more than one: Extra data"), ("[1, 2", "got one that breaks off"), ("[]", "got none")],
)
def test_what_is_no_document_is_called_what_it_is(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "odd.json").write_text(text)
    assert said in refused("show", tmp_path / "odd.json")
