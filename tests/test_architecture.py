"""The architecture holds, and every rule of it finds a breach in a small tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.architecture_rules import (
    PACKAGES,
    RULES,
    circles,
    every_file_in_a_room,
    file_names,
    files,
    hidden_submodules,
    methods_stand_alone,
    mirrored_tests,
    module_names_in_strings,
    one_meaning_of_a_name,
    order_of_rooms,
    packages_apart,
    rooms,
    shared_builders,
    simulators_stand_alone,
    small_files,
    small_folders,
    solvers_imports,
    solvers_input_output,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps(rule):
    assert list(rule(ROOT)) == []


def test_there_is_something_to_check():
    assert all(files(ROOT, package) for package in PACKAGES)
    assert len(rooms(ROOT)) >= 20


BREACHES = [
    (order_of_rooms, "planner/plans/plan.py", "from planner.cli import commands"),
    (order_of_rooms, "planner/plans/plan.py", "def f():\n    from ..cli.commands import main"),
    (order_of_rooms, "planner/zoo/__init__.py", "from planner.plans import plan"),
    (order_of_rooms, "planner/units.py", "import planner.plans.plan"),
    (order_of_rooms, "planner/plans/plan.py", "from planner import Plan"),
    (order_of_rooms, "profiler/records.py", "import importlib\nimportlib.import_module('profiler.trace.step')"),
    (order_of_rooms, "solvers/problem/simulator.py", "from solvers import Chain"),
    (packages_apart, "profiler/trace/step.py", "import planner.plans.plan"),
    (packages_apart, "profiler/trace/step.py", "def f():\n    from solvers import Chain"),
    (packages_apart, "solvers/chain/rotor.py", "from planner.plans import plan"),
    (packages_apart, "solvers/deep/rotor.py", "import profiler.records"),
    (circles, "solvers/chain/segments.py", "from solvers.chain.rotor import solve"),
    (circles, "solvers/chain/segments.py", "def f():\n    from solvers.chain.registry import solve_chain"),
    (every_file_in_a_room, "planner/orphan.py", ""),
    (every_file_in_a_room, "solvers/new_room/rotor.py", ""),
    (module_names_in_strings, "planner/plans/plan.py", "NAME = 'planner.plans.gone'"),
    (module_names_in_strings, "tests/test_plan.py", "setattr('planner.plans.plan.no', 1)"),
    (small_folders, "planner/plans/plan_26.py", ""),
    (small_files, "planner/plans/plan.py", "\n" * 601),
    (small_files, "tests/system/test_exact.py", "\n" * 601),
    (solvers_imports, "solvers/chain/rotor.py", "import torch"),
    (solvers_imports, "solvers/chain/rotor.py", "from importlib import import_module\nimport_module('torch.nn')"),
    (solvers_imports, "solvers/chain/rotor.py", "from matplotlib import pyplot"),
    (solvers_input_output, "solvers/chain/rotor.py", "def f():\n    print(1)"),
    (methods_stand_alone, "solvers/chain/rotor.py", "from solvers.chain.chen import solve"),
    (methods_stand_alone, "solvers/chain/rotor.py", "from .chen import solve"),
    (methods_stand_alone, "solvers/chain/segments.py", "from solvers.chain import chen"),
    (simulators_stand_alone, "solvers/problem/simulator.py", "from solvers.chain import rotor"),
    (simulators_stand_alone, "solvers/problem/simulator.py", "from solvers.chain.segments import build"),
    (file_names, "planner/profile.py", ""),
    (file_names, "tests/planner/helpers.py", ""),
    (hidden_submodules, "planner/__init__.py", "def plans(): ..."),
    (hidden_submodules, "planner/__init__.py", "from planner.other import build as plans"),
    (hidden_submodules, "solvers/chain/segments.py", "def rotor(): ..."),
    (one_meaning_of_a_name, "planner/units.py", "class Plan: ..."),
    (one_meaning_of_a_name, "profiler/trace/step.py", "Bytes = float"),
    (mirrored_tests, "tests/planner/other/test_plan.py", ""),
    (shared_builders, "tests/planner/plans/test_plan.py", "from tests.planner.plans import test_rules"),
    (shared_builders, "benchmarks/solvers.py", "from tests.support import chains"),
]


@pytest.fixture
def tree(tmp_path):
    """A small repository that keeps every rule."""
    contents = {
        "docs/architecture.md": "```rooms\nprofiler: records < trace\nsolvers: problem < highs < chain\n"
        "planner: units, zoo < plans < cli\n```\n",
        "profiler/trace/step.py": "import torch\nfrom profiler import records",
        "profiler/records.py": "import pandas",
        "solvers/__init__.py": "from solvers.chain.registry import solve_chain\nfrom solvers.chain import rotor",
        "solvers/chain/registry.py": "from solvers.chain import chen, rotor\n"
        "from solvers.problem.simulator import replay",
        "solvers/problem/simulator.py": "import math\nfrom .data import Chain\ndef replay(): ...",
        "solvers/problem/data.py": "",
        "solvers/chain/segments.py": "from solvers.problem.data import Chain",
        "solvers/chain/rotor.py": "import numpy as np\nfrom solvers.chain.segments import build\ndef solve(): ...",
        "solvers/chain/chen.py": "def solve(): ...",
        "solvers/chain/ilp.py": "import pulp",
        "planner/__init__.py": "from planner.plans.plan import Plan\nfrom planner import plans",
        "planner/__main__.py": "from planner.cli.commands import main",
        "planner/cli/commands.py": "from planner import Plan\ndef main():\n    print('planner.plans.plan.Plan')",
        "planner/plans/plan.py": "import solvers.chain.rotor, torch, matplotlib\nclass Plan: ...",
        "planner/units.py": "Bytes = int\nclass _Plan: ...",
        "solvers/highs.py": "Bytes = int",
        "planner/zoo/__init__.py": "from planner import units",
        "tests/planner/plans/test_plan.py": "from tests.support.chains import small",
        "tests/system/test_exact.py": "",
        **{f"planner/{room}/__init__.py": "" for room in ("plans", "cli")},
        **{f"planner/plans/plan_{k}.py": "" for k in range(23)},
    }
    for name, text in contents.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_tree_passes(rule, tree):
    assert list(rule(tree)) == []


@pytest.mark.parametrize(("rule", "name", "text"), BREACHES)
def test_a_breach_is_found(rule, name, text, tree):
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert len(list(rule(tree))) == 1


def test_importing_solvers_loads_no_torch():
    code = "import sys, solvers; print(sorted({'torch', 'matplotlib', 'planner', 'profiler'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
