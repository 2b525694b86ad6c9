"""Changes the three packages in seeded places, one at a time, and says which tests notice.

``python -m tests.support.changed_places --count 60 --seed 1 -o found.jsonl`` measures the power of the tests: each
changed place is tried in a clone of its own, first with the tests of its room, then with those of the rooms that import
the changed module, then with ``tests/system``. ``--marks`` chooses tests as ``pytest -m`` does, so two choices can be
compared on the same places: ``--places found.jsonl`` tries the places of an earlier run again. A run that was stopped
goes on where it was, as each place is written to the file as soon as it is tried.

Some changes change nothing that a program can notice; they count as missed in every run.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

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

    def changed(self, text: str) -> str:
        """The file's text with the change in it; raises ValueError where ``before`` does not stand there."""
        lines = text.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        whole, before = text.encode(), self.before.encode()
        if whole[start : start + len(before)] != before:
            raise ValueError(f"{self.path}:{self.line}: {self.before!r} does not stand there; draw the places again")
        return (whole[:start] + self.after.encode() + whole[start + len(before) :]).decode()


def places_of(path: str, text: str) -> Iterator[Place]:
    """Every place of a file that can be changed; annotations, docstrings and text are left alone."""
    starts = [0, *itertools.accumulate(len(line) for line in text.encode().splitlines(keepends=True))]
    for parent in ast.walk(ast.parse(text)):
        for node in ast.iter_child_nodes(parent):
            after = _changed_node(node, parent)
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


def noticed_by(place: Place, clone: Path, marks: str, limit_s: float) -> str | None:
    """The first test that fails with the change; None where all pass. A run beyond ``limit_s`` counts as noticed."""
    file = clone / place.path
    text = file.read_text(encoding="utf-8")
    file.write_text(place.changed(text), encoding="utf-8")
    try:
        for choice in (f"({marks}) and not slow", f"({marks}) and slow"):
            for folder in folders_of_tests(place.path):
                if test := _failing(clone, folder, choice, limit_s):
                    return test
        return None
    finally:
        file.write_text(text, encoding="utf-8")


def _failing(clone: Path, folder: str, marks: str, limit_s: float) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-m", marks, folder]
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    try:
        run = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"{folder}: no end within {limit_s:.0f} s"
    if run.returncode in {0, 5}:  # 5: no test was chosen
        return None
    lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"{folder}: pytest ended with {run.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", type=Path, help="the result file of another run, whose places are tried")
    parser.add_argument("--marks", default="not nightly", help="as pytest's -m (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=1800.0, help="for the tests of one folder")
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    before = [json.loads(line) for line in asked.places.read_text().splitlines()] if asked.places else []
    places = [Place(**row["place"]) for row in before] or drawn(asked.count, asked.seed)
    written = asked.output.read_text().splitlines() if asked.output.exists() else []
    done = {Place(**json.loads(line)["place"]) for line in written}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        clones = [_clone(Path(folder) / str(number)) for number in range(asked.jobs)]

        def tried(place: Place) -> None:
            clone = clones.pop()
            noticed = noticed_by(place, clone, asked.marks, asked.limit_seconds)
            clones.append(clone)
            with asked.output.open("a") as file:
                file.write(json.dumps({"place": asdict(place), "noticed_by": noticed}) + "\n")

        list(pool.map(tried, [place for place in places if place not in done]))
    rows = [json.loads(line) for line in asked.output.read_text().splitlines()]
    noticed = sum(row["noticed_by"] is not None for row in rows)
    sys.stdout.write(f"{noticed} of {len(rows)} changed places are noticed\n")


def _clone(folder: Path) -> Path:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    return folder


if __name__ == "__main__":
    main()
