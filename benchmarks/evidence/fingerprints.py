"""Fingerprints of the code that a result measures: the benchmark's module, and what it imports of our packages."""

from __future__ import annotations

import ast
import hashlib
import io
import subprocess
import tarfile
import tokenize
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FACES = ("planner", "profiler", "solvers")  # their __init__ only says where public names lie
PACKAGES = (*FACES, "benchmarks")
# What writes tables down, and does not take part in measuring.
WRITING = ("benchmarks/reporting.py", "benchmarks/evidence/")

# Files, beside modules, that benchmarks read.
DATA = {"benchmarks.solvers": "benchmarks/problems/*", "benchmarks.offload": "benchmarks/chains/bert-large-v100.json"}

Read = Callable[[str], str | None]


def fingerprint(module: str, read: Read | None = None) -> str:
    """Twelve hex digits that change with any statement of the files that a module depends on.

    Args:
        module: a benchmark's, as in ``python -m MODULE``.
        read: the text of a file by its path in the repository, None where there is none; by default of the working
            tree.
    """
    read = read or working_tree
    digest = hashlib.sha256()
    data = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(DATA[module])) if module in DATA else []
    for path in [*files_of(module, read), *data]:
        text = read(path)
        code = "" if text is None else statements(text) if path.endswith(".py") else text
        digest.update(f"{path}\0{code}\0".encode())
    return digest.hexdigest()[:12]


def files_of(module: str, read: Read | None = None) -> list[str]:
    """Paths of the files of our packages that a module imports, however deep; itself first, the others by name."""
    read = read or working_tree
    start = _path_of(module, read) or _path_of(f"{module}.__main__", read)
    if start is None:
        raise ValueError(f"fingerprint: expected a module of {', '.join(PACKAGES)}, got {module}")
    main = _path_of(f"{module}.__main__", read)
    found: set[str] = set()
    waiting = [start, *([main] if main else [])]
    while waiting:
        path = waiting.pop()
        if path in found or path.startswith(WRITING):
            continue
        found.add(path)
        waiting += _imported(path, read)
    first = main or start
    kept = sorted(path for path in found if path != first)
    return [first, *kept]


def working_tree(path: str) -> str | None:
    """The text of a file as it lies here."""
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None


@cache
def of_commit(commit: str) -> Read:
    """Reads files as they were at a commit.

    Raises:
        ValueError: this is no checkout that has the commit.
    """
    folders = subprocess.run(["git", "ls-tree", "--name-only", commit], cwd=ROOT, capture_output=True, text=True)
    there = [name for name in PACKAGES if name in folders.stdout.split()]
    made = subprocess.run(["git", "archive", commit, *there], cwd=ROOT, capture_output=True)
    if made.returncode:
        raise ValueError(f"git archive {commit}: {made.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        streams = ((member.name, archive.extractfile(member)) for member in archive if member.isfile())
        texts = {name: stream.read().decode() for name, stream in streams if stream is not None}
    return texts.get


@cache
def statements(source: str) -> str:
    """Python source without comments, docstrings and blank lines: rewording these changes no measurement.

    >>> statements("# says\\n\\nx = 1  # one\\n")
    'x = 1'
    """
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    for token in [each for each in tokens if each.type == tokenize.COMMENT]:
        row, column = token.start
        lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.value.end_lineno:
                for row in range(first.value.lineno, first.value.end_lineno + 1):
                    lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _imported(path: str, read: Read) -> Iterator[str]:
    for name in _names_in(path, read(path) or ""):
        face, _, public = name.partition(".")
        home = _homes_in(read(f"{face}/__init__.py") or "").get(public) if face in FACES else None
        found = _path_of(home or name, read)
        if found is not None and not _is_face(found):
            yield found


@cache
def _names_in(path: str, text: str) -> frozenset[str]:
    """Names of modules, and of what may be modules or public names of ours, that a file uses, at once or later."""
    own = path.removesuffix("/__init__.py") if path.endswith("/__init__.py") else path.rpartition("/")[0]
    found = {own.replace("/", ".")}
    for node in _loaded(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = own.split("/")[: len(own.split("/")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in FACES:
            found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.partition(":")[0])  # the module of a command or of a target
    return frozenset(name for name in found if name.partition(".")[0] in PACKAGES)


def _loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads: annotations, and what stands under TYPE_CHECKING."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                parts = value if isinstance(value, list) else [value]
                waiting += [part for part in parts if isinstance(part, ast.AST)]


@cache
def _homes_in(text: str) -> Mapping[str, str]:
    """Public names of a package, and the module of each."""
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: node.module or "" for node in imports for alias in node.names if node.module not in FACES}


def _is_face(path: str) -> bool:
    return path in {f"{face}/__init__.py" for face in FACES}


def _path_of(name: str, read: Read) -> str | None:
    if name.partition(".")[0] not in PACKAGES or not all(part.isidentifier() for part in name.split(".")):
        return None
    base = name.replace(".", "/")
    return next((path for path in (f"{base}.py", f"{base}/__init__.py") if read(path) is not None), None)
