"""Public names of both packages: resolved when they are first used, the same for people, type checkers and ``dir``."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import planner
import profiler
from planner import errors, results

PACKAGES = [planner, errors, results, profiler]


def homes(package: ModuleType) -> dict[str, str]:
    return {name: module for module, names in package._NAMES.items() for name in names.split()}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_what_its_module_defines(package: ModuleType):
    for name, module in homes(package).items():
        assert getattr(package, name) is getattr(import_module(module), name)
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_same_names(package: ModuleType):
    tree = ast.parse(Path(package.__file__ or "").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").count(".")]
    seen = {alias.asname: node.module for node in imported for alias in node.names if alias.name == alias.asname}
    assert seen == homes(package)


@pytest.mark.slow
def test_importing_the_planner_loads_no_torch_until_it_is_needed():
    loaded = "sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules))"
    assert run(f"import sys, planner; print({loaded})") == "[]"
    names = "planner.errors.RankError, planner.results.Advice"
    assert run(f"import sys, planner; planner.errors, planner.results; print({loaded})") == "[]"
    assert "torch" in run(f"import sys, planner; {names}; print({loaded})")
    assert "torch" in run(f"import sys, planner; planner.Workload; print({loaded})")


@pytest.mark.slow
def test_the_zoo_is_there_and_what_is_not_is_said():
    assert run("import planner; print('gpt2' in planner.zoo.names())") == "True"
    with pytest.raises(AttributeError, match="module 'planner' has no attribute 'nothing'"):
        planner.nothing  # noqa: B018


def test_few_names_are_at_the_top():
    assert len(planner.__all__) <= 25
    assert not set(planner.__all__) & (set(results.__all__) | set(errors.__all__) - {"Infeasible"})
