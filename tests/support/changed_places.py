"""Changes the three packages in seeded places, one at a time, and says which tests notice.

``python -m tests.support.changed_places --places places.jsonl -o found.jsonl`` measures the power of the tests. The
places, and the tests that reach each of them, are found first, in one run of all tests, and written to the file that
``--places`` names; where that file is there, they are read. Then each place is changed in a clone of its own, and the
tests that reach it run until one fails, quick ones first. ``--marks`` chooses tests as ``pytest -m`` does, so two
choices can be compared on the same places. A run that was stopped goes on where it was, as each place is written as
soon as it is tried.

For places that are run while a module is imported, or by no test, the tests of the module's room run instead, and those
of rooms that import it. Some changes change nothing that a program can notice; they count as missed in every run.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support import reached_places
from tests.support.architecture_rules import imported_modules, module_of, room_of, sources

ROOT = Path(__file__).parents[2]
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
EXTREMES = {"min": "max", "max": "min"}


@dataclass(frozen=True)
class Place:
    """One change: the text ``before`` at a line and column of a file becomes ``after``."""

    path: str
    line: int  # from 1
    column: int  # in bytes, from 0, as ast counts
    before: str
    after: str

    def start(self, text: str) -> int:
        """The byte of the file at which ``before`` begins; raises ValueError where it does not stand there."""
        lines = text.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        if not text.encode().startswith(self.before.encode(), start):
            raise ValueError(f"{self.path}:{self.line}: {self.before!r} does not stand there; draw the places again")
        return start

    def changed(self, text: str) -> str:
        """The file's text with the change in it."""
        whole, start = text.encode(), self.start(text)
        return (whole[:start] + self.after.encode() + whole[start + len(self.before.encode()) :]).decode()


def places_of(path: str, text: str) -> Iterator[Place]:
    """Every place of a file that can be changed; annotations, docstrings, patterns and text are left alone."""
    starts = [0, *itertools.accumulate(len(line) for line in text.encode().splitlines(keepends=True))]
    tree = ast.parse(text)
    left_alone = {n for part in ast.walk(tree) if isinstance(part, ast.JoinedStr | ast.pattern) for n in ast.walk(part)}
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            after = None if node in left_alone else _changed_node(node, parent)
            if after and isinstance(node, ast.expr | ast.stmt) and not _is_annotation(node, parent):
                end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                before = text.encode()[starts[node.lineno - 1] + node.col_offset : end].decode()
                yield Place(path, node.lineno, node.col_offset, before, after)


def _is_annotation(node: ast.AST, parent: ast.AST) -> bool:
    return node in {getattr(parent, "annotation", None), getattr(parent, "returns", None)}


def _changed_node(node: ast.AST, parent: ast.AST) -> str | None:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            return f"({ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], [right]))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not _is_text(left, right):
            return f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(op)](), right))})"
        case ast.BoolOp(op=op, values=values):
            return f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)):
            return str(value + 1)
        case ast.Name(id=name) if name in EXTREMES and isinstance(parent, ast.Call) and parent.func is node:
            return EXTREMES[name]
        case ast.Expr(value=ast.Call()):
            return "pass"
        case _:
            return None


def _is_text(*nodes: ast.expr) -> bool:
    return any(isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str) for node in nodes)


def drawn(count: int, seed: int) -> list[Place]:
    """``count`` places of the three packages, each file as likely as it is long."""
    found = [
        place
        for path in sources(ROOT)
        for place in places_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]
    return random.Random(seed).sample(found, count)


def with_notes(text: str, places: Mapping[int, Place]) -> str:
    """The file's text with a call before each of its places that notes the place's number."""
    whole, edits = text.encode(), []
    for number, place in places.items():
        start, size = place.start(text), len(place.before.encode())
        edits.append(
            (start, 1, -size, f'(__import__("{reached_places.__name__}", fromlist=["note"]).note({number}) or (')
        )
        edits.append((start + size, 0, size, "))"))
    for offset, _, _, added in sorted(edits, reverse=True):
        whole = whole[:offset] + added.encode() + whole[offset:]
    return whole.decode()


def tests_reaching(places: Sequence[Place], clone: Path, marks: str, jobs: int) -> list[list[str]]:
    """The tests that run each place; an empty name among them stands for its being run without a test."""
    by_path: dict[str, dict[int, Place]] = {}
    for number, place in enumerate(places):
        by_path.setdefault(place.path, {})[number] = place
    texts = {path: (clone / path).read_text(encoding="utf-8") for path in by_path}
    for path, here in by_path.items():
        (clone / path).write_text(with_notes(texts[path], here), encoding="utf-8")
    with tempfile.NamedTemporaryFile("r", suffix=".tsv") as file:
        _pytest(clone, ["-n", str(jobs), "--dist", "worksteal", "-m", marks], {reached_places.FILE: file.name})
        noted = {(int(number), test) for number, _, test in (line.partition("\t") for line in file.read().splitlines())}
    for path, text in texts.items():
        (clone / path).write_text(text, encoding="utf-8")
    return [sorted(test for noted_number, test in noted if noted_number == number) for number in range(len(places))]


def folders_of_tests(path: str) -> list[str]:
    """The folders of tests that may notice a change of a module, its own room first."""
    modules = {module_of(p, ROOT): p for p in sources(ROOT)}
    own = module_of(ROOT / path, ROOT)
    importing = [name for name, p in modules.items() if own in imported_modules(p, ROOT, modules)]
    rooms = dict.fromkeys(room_of(name) for name in (own, *importing))
    folders = dict.fromkeys(str(_folder_of(room)) for room in rooms)
    return [*folders, "tests/system"]


def _folder_of(room: str) -> Path:
    folder = Path("tests", *room.split("."))
    return folder if (ROOT / folder).is_dir() else folder.parent


def noticed_by(place: Place, tests: Sequence[str], clone: Path, marks: str, limit_s: float) -> str | None:
    """The first test that fails with the change; None where all pass. A run beyond ``limit_s`` counts as noticed."""
    file = clone / place.path
    text = file.read_text(encoding="utf-8")
    chosen = tests if tests and "" not in tests else folders_of_tests(place.path)
    file.write_text(place.changed(text), encoding="utf-8")
    try:
        for choice in (f"({marks}) and not slow", f"({marks}) and slow"):
            if test := _failing(clone, chosen, choice, limit_s):
                return test
        return None
    finally:
        file.write_text(text, encoding="utf-8")


def _failing(clone: Path, tests: Sequence[str], marks: str, limit_s: float) -> str | None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:  # A command line may not be so long.
        file.write("\n".join(tests))
        file.flush()
        try:
            run = _pytest(clone, ["-x", "--tb=no", "-m", marks, f"@{file.name}"], {}, limit_s)
        except subprocess.TimeoutExpired:
            return f"no end within {limit_s:.0f} s"
    if run.returncode in {0, 5}:  # 5: no test was chosen
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"pytest ended with {run.returncode}"


def _pytest(
    clone: Path, arguments: Sequence[str], variables: Mapping[str, str], limit_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(clone), **variables}
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=limit_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", type=Path, required=True, help="the places and the tests that reach them")
    parser.add_argument("--marks", default="not nightly", help="as pytest's -m (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=3600.0, help="for the tests of one place")
    parser.add_argument("-o", "--output", type=Path, help="which tests notice; without it the places are only found")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        clones = [_clone(Path(folder) / str(number)) for number in range(asked.jobs)]
        if not asked.places.exists():
            found = drawn(asked.count, asked.seed)
            reaching = tests_reaching(found, clones[0], asked.marks, asked.jobs)
            rows = [{"place": asdict(place), "tests": tests} for place, tests in zip(found, reaching, strict=True)]
            asked.places.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        if asked.output is None:
            return
        reached = {Place(**row["place"]): row["tests"] for row in _rows(asked.places)}
        done = {Place(**row["place"]) for row in _rows(asked.output)} if asked.output.exists() else set()

        def tried(place: Place) -> None:
            clone = clones.pop()
            noticed = noticed_by(place, reached[place], clone, asked.marks, asked.limit_seconds)
            clones.append(clone)
            with asked.output.open("a") as file:
                file.write(json.dumps({"place": asdict(place), "noticed_by": noticed}) + "\n")

        list(pool.map(tried, [place for place in reached if place not in done]))
    rows = _rows(asked.output)
    noticed = sum(row["noticed_by"] is not None for row in rows)
    sys.stdout.write(f"{noticed} of {len(rows)} changed places are noticed\n")


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _clone(folder: Path) -> Path:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    return folder


if __name__ == "__main__":
    main()
