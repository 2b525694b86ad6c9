"""The architecture holds: who imports whom, what solvers must not touch, and names that would hide each other.

Each rule is a function from the repository's root to the breaches found, so
that it can be held against the real tree and against a small tree that breaks it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("profiler", "solvers", "planner")

METHODS = {"keep_all", "recompute_all", "chen_sqrt", "chen_greedy", "revolve", "rotor", "ilp", "exhaustive"} | {
    "offload",
    "pofo",
    "offload_ilp",
    "checkmate",
    "lower_sets",
    "intervals",
    "hierarchy",
    "backward_ilp",
    "graph_exhaustive",
    "local_search",
}
# The registries; no other file of solvers/ may import a method.
METHOD_READERS = {"__init__", "suite", "candidates", "offload_suite", "graph_suite"}
PROBLEM_DATA = {
    "chain",
    "graph",
    "problem",
    "schedule",
    "graph_schedule",
    "link",
    "copy_engines",  # a part of the simulator
}  # all that a simulator may import of solvers/
SOLVER_LIBRARIES = {"numpy", "pulp", "highspy", "solvers"}  # and the standard library
FORBIDDEN_NAMES = {"profile.py", "utils.py", "helpers.py"}


def files(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


def imports(path: Path, root: Path) -> set[str]:
    """Full names of all that a file imports, wherever it does; ``from a import b`` gives ``a`` and ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, path, root)
            found.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
        elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__"}:
            found.update(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
    return found


def absolute(node: ast.ImportFrom, path: Path, root: Path) -> str:
    if not node.level:
        return node.module or ""
    package = path.relative_to(root).parent.parts
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def solver_modules(names: set[str]) -> set[str]:
    """The modules directly under solvers/ among ``names``."""
    return {name.split(".")[1] for name in names if name.startswith("solvers.")}


def profiler_imports(root: Path) -> Iterator[str]:
    for path in files(root, "profiler"):
        for name in sorted(tops(imports(path, root)) & {"planner", "solvers"}):
            yield f"{path.relative_to(root)} imports {name}: profiler/ knows neither planner/ nor solvers/"


def solvers_imports(root: Path) -> Iterator[str]:
    for path in files(root, "solvers"):
        for name in sorted(tops(imports(path, root)) - SOLVER_LIBRARIES - set(sys.stdlib_module_names)):
            yield f"{path.relative_to(root)} imports {name}: solvers/ takes numpy, pulp and the standard library"


def solvers_input_output(root: Path) -> Iterator[str]:
    for path in files(root, "solvers"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "open"}:
                yield f"{path.relative_to(root)}:{node.lineno} calls {node.func.id}: solvers/ does no I/O"


def methods_stand_alone(root: Path) -> Iterator[str]:
    for path in files(root, "solvers"):
        used = solver_modules(imports(path, root)) & (METHODS - {path.stem})
        if path.stem not in METHOD_READERS and used:
            yield f"{path.relative_to(root)} imports {sorted(used)}: a method is no shared code"


def simulators_stand_alone(root: Path) -> Iterator[str]:
    modules = {path.stem for path in files(root, "solvers")} - PROBLEM_DATA
    for path in files(root, "solvers"):
        used = solver_modules(imports(path, root)) & modules
        if (path.stem.endswith("simulator") or path.stem == "copy_engines") and used:
            yield f"{path.relative_to(root)} imports {sorted(used)}: a simulator reads problem data and nothing else"


def face_is_not_imported(root: Path) -> Iterator[str]:
    for package in PACKAGES:
        for path in files(root, package):
            inside = path.relative_to(root).as_posix()
            own = inside == "planner/__main__.py" or inside.startswith("planner/cli")
            names = imports(path, root)
            if not own and any(name == "planner.cli" or name.startswith("planner.cli.") for name in names):
                yield f"{inside} imports planner.cli: only planner/__main__.py may"


def file_names(root: Path) -> Iterator[str]:
    for package in (*PACKAGES, "benchmarks", "tests"):
        for path in files(root, package):
            if path.name in FORBIDDEN_NAMES:
                yield f"{path.relative_to(root)}: name the file after what it owns"


def hidden_submodules(root: Path) -> Iterator[str]:
    for package in PACKAGES:
        for folder in sorted({path.parent for path in files(root, package)}):
            beside = {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/__init__.py")}
            for path in sorted(folder.glob("*.py")):
                for name in sorted(functions(path) & (beside - {"__init__", "__main__"})):
                    yield f"{path.relative_to(root)} has a function {name} beside the submodule {name}"


def functions(path: Path) -> set[str]:
    """Public functions of a module; for a package also the names that it re-exports from inside other modules."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if path.name == "__init__.py":
        for node in body:
            if isinstance(node, ast.ImportFrom) and not imports_submodules(node, path):
                found.update(alias.asname or alias.name for alias in node.names)
    return found


def imports_submodules(node: ast.ImportFrom, path: Path) -> bool:
    """``from . import x`` and ``from package import x``: x is then the submodule itself."""
    return (node.level == 1 and not node.module) or (not node.level and node.module == path.parent.name)


RULES: tuple[Callable[[Path], Iterator[str]], ...] = (
    profiler_imports,
    solvers_imports,
    solvers_input_output,
    methods_stand_alone,
    simulators_stand_alone,
    face_is_not_imported,
    file_names,
    hidden_submodules,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps(rule):
    assert list(rule(ROOT)) == []


def test_there_is_something_to_check():
    assert all(files(ROOT, package) for package in PACKAGES)
    assert (ROOT / "solvers" / "simulator.py").exists()


BREACHES = [
    (profiler_imports, "profiler/meter.py", "import planner.plan"),
    (profiler_imports, "profiler/meter.py", "def f():\n    from solvers import Chain"),
    (solvers_imports, "solvers/rotor.py", "import torch"),
    (solvers_imports, "solvers/rotor.py", "from importlib import import_module\nimport_module('torch.nn')"),
    (solvers_imports, "solvers/rotor.py", "from planner import plan"),
    (solvers_imports, "solvers/deep/rotor.py", "import profiler.records"),
    (solvers_imports, "solvers/rotor.py", "from matplotlib import pyplot"),
    (solvers_input_output, "solvers/rotor.py", "def f():\n    print(1)"),
    (methods_stand_alone, "solvers/rotor.py", "from solvers.chen_sqrt import solve"),
    (methods_stand_alone, "solvers/rotor.py", "from .chen_sqrt import solve"),
    (methods_stand_alone, "solvers/segments.py", "from solvers import ilp"),
    (simulators_stand_alone, "solvers/simulator.py", "from . import rotor"),
    (simulators_stand_alone, "solvers/simulator.py", "from solvers.segments import build"),
    (face_is_not_imported, "planner/plan.py", "from planner import cli"),
    (face_is_not_imported, "planner/plan.py", "from .cli import main"),
    (face_is_not_imported, "planner/zoo/__init__.py", "from ..cli.show import main"),
    (file_names, "planner/profile.py", ""),
    (file_names, "tests/planner/helpers.py", ""),
    (hidden_submodules, "planner/__init__.py", "def plan(): ..."),
    (hidden_submodules, "planner/__init__.py", "from planner.other import build as plan"),
    (hidden_submodules, "solvers/simulator.py", "def rotor(): ..."),
]


@pytest.fixture
def tree(tmp_path):
    """A small repository that keeps every rule."""
    contents = {
        "profiler/meter.py": "import torch\nfrom profiler import records",
        "profiler/records.py": "import pandas",
        "solvers/__init__.py": "from solvers.suite import solve_chain\nfrom . import rotor",
        "solvers/suite.py": "from solvers import chen_sqrt, rotor\nfrom solvers.simulator import replay",
        "solvers/simulator.py": "import math\nfrom .chain import Chain\ndef replay(): ...",
        "solvers/segments.py": "from solvers.chain import Chain",
        "solvers/chain.py": "",
        "solvers/rotor.py": "import numpy as np\nfrom solvers.segments import build\ndef solve(): ...",
        "solvers/chen_sqrt.py": "def solve(): ...",
        "solvers/ilp.py": "import pulp",
        "planner/__init__.py": "from planner.plan import Plan\nfrom planner import plan",
        "planner/__main__.py": "from planner.cli import main",
        "planner/cli.py": "def main():\n    print(1)",
        "planner/plan.py": "import solvers.rotor, torch, matplotlib",
        "planner/zoo/__init__.py": "from planner import sizes",
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
