"""The table of rooms in docs/architecture.md, as data for the pages and the picture that are made from it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rooms_in(text: str) -> dict[str, list[list[str]]]:
    """Each package's rooms in the order of imports; rooms that share a place share a list.

    >>> rooms_in("```rooms\\nsolvers: problem < highs, saved < chain\\n```")
    {'solvers': [['problem'], ['highs', 'saved'], ['chain']]}
    """
    table = re.search(r"^```rooms\n(.*?)^```", text, re.M | re.S)
    if table is None:
        raise ValueError("docs/architecture.md: expected a block ```rooms, got none; add it")
    lines = (line.partition(":") for line in table[1].splitlines() if line.strip())
    return {
        package.strip(): [[name.strip() for name in place.split(",")] for place in order.split("<")]
        for package, _, order in lines
    }


def rooms() -> dict[str, list[list[str]]]:
    """The rooms of this repository."""
    return rooms_in((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))


def modules_of(package: str, room: str) -> list[str]:
    """Import names of a room's modules: the room itself where it is one file."""
    folder = ROOT / package / room
    if not folder.is_dir():
        return [f"{package}.{room}"]
    return [f"{package}.{room}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]


def first_sentence(module: str) -> str:
    """What a module's docstring begins with, up to the end of its first paragraph."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def each_room() -> Iterator[tuple[str, str]]:
    """Pairs (package, room) in the order of the table."""
    for package, places in rooms().items():
        for place in places:
            for room in place:
                yield package, room
