"""A file of the user's that has the name of one of our packages is named, with what to do about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import profiler
import solvers
from tests.support import ROOT
from tests.support.command_line import TARGETS, refused


def last_line(folder: Path, *args: str) -> str:
    """Of what Python says on stderr, where our packages are installed and the folder comes first."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *args], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["profiler", "solvers"])
@pytest.mark.parametrize("ending", [".py", "/__init__.py"])
@pytest.mark.parametrize("args", [("script.py",), ("-m", "planner", "--version")])
def test_the_file_that_hides_a_package_is_named_at_import(tmp_path, name, ending, args):
    file = tmp_path / f"{name}{ending}"
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('run')")
    (tmp_path / "script.py").write_text("import planner")
    said = last_line(tmp_path, *args)
    assert said.startswith(f"ImportError: planner: expected its own package '{name}' at {ROOT / name}, got {file}, ")
    assert said.endswith(f"which hides it; rename {tmp_path / name}{ending.removesuffix('/__init__.py')}")


def test_a_module_that_is_imported_already_is_named_too(tmp_path):
    hiding = tmp_path / f"{solvers.__name__}.py"
    hiding.write_text("")
    (tmp_path / "script.py").write_text("import solvers, planner")
    assert f"rename {hiding}" in last_line(tmp_path, "script.py")


@pytest.mark.slow
def test_a_target_beside_such_a_file_gets_our_packages(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{solvers.__name__}.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "code" / "own.py").write_text(TARGETS)
    code = "import sys, planner.targets as t; t.load_target('code/own.py:talks'); import planner.plans.solving"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)


def test_a_target_that_wants_such_a_file_itself_is_told_why_it_does_not_get_it(tmp_path):
    hiding = tmp_path / f"{profiler.__name__}.py"
    hiding.write_text("def timer(): pass")
    (tmp_path / "own.py").write_text("from profiler import timer")
    said = refused("profile", f"{tmp_path / 'own.py'}:build")
    assert "cannot import name 'timer'" in said
    assert f"rename {hiding}: the planner's own package of that name is imported instead" in said
