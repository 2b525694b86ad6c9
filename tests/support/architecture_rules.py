"""The rules of the architecture: rooms in their order, no circles, what solvers must not touch, one meaning for a name.

The order of rooms is read from the table in docs/architecture.md. Each rule is a function from the repository's root
to the breaches found, so that it can be held against the real tree and against a small tree that breaks it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from docs.hooks.rooms_table import rooms_in

PACKAGES = ("profiler", "solvers", "planner")
MOST_FILES = 25  # in one folder
MOST_LINES = 600  # of one file

SOLVER_LIBRARIES = {"numpy", "pulp", "highspy", "msgspec", "solvers"}  # and the standard library
REGISTRIES = {"registry", "candidates"}
TEST_FOLDERS = {"system", "support", "gpu", "benchmarks", "docs"}
ONE_A_FRAMEWORK = {"MemoryBudgetCallback"}  # the same thing for each framework, derived from that one's own class
FORBIDDEN_NAMES = {"profile.py", "utils.py", "helpers.py"}


# What the tree says


def files(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


def sources(root: Path) -> list[Path]:
    return [path for package in PACKAGES for path in files(root, package)]


def module_of(path: Path, root: Path) -> str:
    """The import name of a file; a package's own for its ``__init__``."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


def imported_modules(path: Path, root: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of this tree that a file imports; of ``from a import b`` it is ``a.b`` where that is a module."""
    found = imports(path, root)
    inner = {name.rpartition(".")[0] for name in found if name in modules}
    outer = {name.rpartition(".")[0] for name in found - set(modules)}
    return {name for name in found if name in modules and (name not in inner or name in outer)}


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


def rooms(root: Path) -> dict[str, int]:
    """Each room (or module at a package's root) of the table, with its place in the package's order."""
    table = rooms_in((root / "docs" / "architecture.md").read_text(encoding="utf-8"))
    return {
        f"{package}.{room}": number
        for package, places in table.items()
        for number, names in enumerate(places)
        for room in names
    }


def room_of(module: str) -> str:
    """``planner.plans`` for ``planner.plans.plan``; the module itself at a root, and the package for its face."""
    return ".".join(module.split(".")[:2])


# Rules


def order_of_rooms(root: Path) -> Iterator[str]:
    """No arrow upwards; the face of a package is imported by its last room and its ``__main__`` alone."""
    place, modules = rooms(root), {module_of(path, root): path for path in sources(root)}
    last = {package: max(p for room, p in place.items() if room.startswith(package + ".")) for package in PACKAGES}
    for name, path in modules.items():
        own, package = room_of(name), name.partition(".")[0]
        if own not in place:
            continue
        for other in sorted(imported_modules(path, root, modules)):
            room = room_of(other)
            if other == package:
                if place[own] < last[package]:
                    yield f"{path.relative_to(root)} imports {other}: the face of its own package"
            elif room.startswith(package + ".") and place.get(room, -1) > place[own]:
                yield f"{path.relative_to(root)} imports {other}: {room} comes after {own}"


def packages_apart(root: Path) -> Iterator[str]:
    for package, unknown in (("profiler", {"planner", "solvers"}), ("solvers", {"planner", "profiler"})):
        for path in files(root, package):
            for name in sorted(tops(imports(path, root)) & unknown):
                yield f"{path.relative_to(root)} imports {name}: {package}/ knows nothing of {name}/"


def circles(root: Path) -> Iterator[str]:
    modules = {module_of(path, root): path for path in sources(root)}
    arrows = {name: imported_modules(path, root, modules) - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        yield f"a circle of imports: {' -> '.join(error.args[1])}"


def every_file_in_a_room(root: Path) -> Iterator[str]:
    place = rooms(root)
    for path in sources(root):
        name = module_of(path, root)
        if name not in PACKAGES and path.name != "__main__.py" and room_of(name) not in place:
            yield f"{path.relative_to(root)}: in no room of docs/architecture.md"


def module_names_in_strings(root: Path) -> Iterator[str]:
    """A string that looks like the name of a module of ours, or of something in one, has to be one."""
    modules = {module_of(path, root): path for path in sources(root)}
    pattern = re.compile(rf"({'|'.join(PACKAGES)})(\.[a-z_]\w*)+(?<!\.csv)(?<!\.md)")  # no names of files
    for path in (*sources(root), *files(root, "tests"), *files(root, "benchmarks")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            if pattern.fullmatch(node.value) and not is_there(node.value, modules):
                yield f"{path.relative_to(root)}:{node.lineno}: {node.value!r} is no module and in none"


def is_there(name: str, modules: dict[str, Path]) -> bool:
    if name in modules:
        return True
    parts = name.split(".")
    known = next((".".join(parts[:k]) for k in reversed(range(1, len(parts))) if ".".join(parts[:k]) in modules), None)
    return known is not None and parts[known.count(".") + 1] in names_in(modules[known])


def names_in(path: Path) -> set[str]:
    """All that a module defines or imports, wherever."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def small_folders(root: Path) -> Iterator[str]:
    for folder in sorted({path.parent for path in sources(root)}):
        count = len(list(folder.glob("*.py")))
        if count > MOST_FILES:
            yield f"{folder.relative_to(root)}: {count} files, at most {MOST_FILES}; is there a room missing?"


def small_files(root: Path) -> Iterator[str]:
    for path in (*sources(root), *files(root, "tests"), *files(root, "benchmarks")):
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > MOST_LINES:
            yield f"{path.relative_to(root)}: {count} lines, at most {MOST_LINES}; does it hold more than one idea?"


def solvers_imports(root: Path) -> Iterator[str]:
    for path in files(root, "solvers"):
        for name in sorted(tops(imports(path, root)) - SOLVER_LIBRARIES - set(sys.stdlib_module_names) - set(PACKAGES)):
            yield f"{path.relative_to(root)} imports {name}: solvers/ takes {sorted(SOLVER_LIBRARIES)}"


def solvers_input_output(root: Path) -> Iterator[str]:
    for path in files(root, "solvers"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "open"}:
                yield f"{path.relative_to(root)}:{node.lineno} calls {node.func.id}: solvers/ does no I/O"


def methods_stand_alone(root: Path) -> Iterator[str]:
    """A method imports no other method. Methods are the modules that a registry imports whole."""
    modules = {module_of(path, root): path for path in files(root, "solvers")}
    registries = [path for name, path in modules.items() if is_registry(name)]
    methods = {method for path in registries for method in whole_imports(path, root, modules)}
    for name, path in modules.items():
        used = imported_modules(path, root, modules) & (methods - {name})
        if used and not is_registry(name) and name != "solvers":
            yield f"{path.relative_to(root)} imports {sorted(used)}: a method is no shared code"


def is_registry(module: str) -> bool:
    return module.startswith("solvers.") and module.rpartition(".")[2] in REGISTRIES


def whole_imports(path: Path, root: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of which a file imports the module itself, and not names in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.update(f"{absolute(node, path, root)}.{alias.name}" for alias in node.names)
    return found & modules.keys()


def simulators_stand_alone(root: Path) -> Iterator[str]:
    """The room of problems and simulators takes nothing from a solver."""
    for path in files(root, "solvers/problem"):
        used = {name for name in imports(path, root) if name.startswith("solvers.")}
        if strange := {name for name in used if room_of(name) != "solvers.problem"}:
            yield f"{path.relative_to(root)} imports {sorted(strange)}: a simulator shares no code with a solver"


def file_names(root: Path) -> Iterator[str]:
    for package in (*PACKAGES, "benchmarks", "tests"):
        for path in files(root, package):
            if path.name in FORBIDDEN_NAMES:
                yield f"{path.relative_to(root)}: name the file after what it owns"


def mirrored_tests(root: Path) -> Iterator[str]:
    """A folder of tests is named after a room, a package, or what it holds beside rooms."""
    known = {room.replace(".", "/") for room in rooms(root)} | {*PACKAGES, *TEST_FOLDERS}
    tests = root / "tests"
    for folder in sorted({path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")} - {"."}):
        if folder not in known:
            yield f"tests/{folder}: named after no room of docs/architecture.md"


def shared_builders(root: Path) -> Iterator[str]:
    """What tests share lies in tests/support; benchmarks build what they measure themselves."""
    for path in (*files(root, "tests"), *files(root, "benchmarks")):
        found = {name for name in imports(path, root) if name.startswith("tests.")}
        inside = path.relative_to(root).as_posix()
        if inside.startswith("benchmarks/") and found:
            yield f"{inside} imports {sorted(found)}: benchmarks take nothing from tests"
        elif strange := {name for name in found if not name.startswith("tests.support")}:
            yield f"{inside} imports {sorted(strange)}: put what tests share into tests/support"


def hidden_submodules(root: Path) -> Iterator[str]:
    for package in PACKAGES:
        for folder in sorted({path.parent for path in files(root, package)}):
            beside = {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/__init__.py")}
            for path in sorted(folder.glob("*.py")):
                for name in sorted(functions(path) & (beside - {"__init__", "__main__"})):
                    yield f"{path.relative_to(root)} has a function {name} beside the submodule {name}"


def one_meaning_of_a_name(root: Path) -> Iterator[str]:
    """A public class, or an alias of a type, is defined once; an alias may stand again where it is the same."""
    definitions: dict[str, dict[str, str]] = {}
    for path in sources(root):
        for name, definition in public_types(path):
            in_a_framework = name in ONE_A_FRAMEWORK and path.parent.name == "integrations"
            place = str((path.parent if in_a_framework else path).relative_to(root))
            definitions.setdefault(name, {})[place] = definition or place
    for name, places in definitions.items():
        if len(set(places.values())) > 1:
            yield f"{name} is defined in {', '.join(places)}: one name, one meaning"


def public_types(path: Path) -> Iterator[tuple[str, str]]:
    """Names of classes, with nothing, and of aliases of types, with what they stand for."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, ""
        elif isinstance(node, ast.Assign) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", name := ast.unparse(node.targets[0])):
            yield name, ast.unparse(node.value)


def functions(path: Path) -> set[str]:
    """Public functions of a module; for a package also the names that it re-exports from inside other modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    if path.name == "__init__.py":
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not imports_submodules(node, path):
                found.update(alias.asname or alias.name for alias in node.names)
    return found


def imports_submodules(node: ast.ImportFrom, path: Path) -> bool:
    """``from . import x`` and ``from package import x``: x is then the submodule itself."""
    return (node.level == 1 and not node.module) or (not node.level and node.module == path.parent.name)


RULES: tuple[Callable[[Path], Iterator[str]], ...] = (
    order_of_rooms,
    packages_apart,
    circles,
    every_file_in_a_room,
    module_names_in_strings,
    small_folders,
    small_files,
    solvers_imports,
    solvers_input_output,
    methods_stand_alone,
    simulators_stand_alone,
    file_names,
    hidden_submodules,
    one_meaning_of_a_name,
    mirrored_tests,
    shared_builders,
)
