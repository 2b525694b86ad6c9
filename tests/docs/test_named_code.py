"""Tests, files and functions that two pages name are there: renaming one changes the page as well."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.doc_blocks import ROOT

RULES = ROOT / "docs" / "recomputation.md"
TOUR = ROOT / "docs" / "reading-the-code.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_PATH = re.compile(r"`((?:planner|profiler|solvers)/[\w/]*\w\.py)`")
_NAME = re.compile(r"`(\w+(?:\.\w+)*)`")
_RULE = re.compile(r"^(\d+)\. (.*?)(?=^\d+\. |^$|\Z)", re.M | re.S)


def missing_tests(text: str) -> list[str]:
    """The tests that a text names as ``tests/path.py::test_name`` and that are not there."""
    return [f"{path}::{name}" for path, name in _TEST.findall(text) if name not in names_of_tests(path)]


@cache
def names_of_tests(path: str) -> frozenset[str]:
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(each.name for each in nodes if isinstance(each, ast.FunctionDef) and each.name.startswith("test_"))


def unknown_names(text: str) -> list[str]:
    """Names in backticks of which a part stands in no file that the same item or paragraph names."""
    found: list[str] = []
    for part in re.split(r"\n\n|\n(?=\d+\. )", text):
        sources = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in _PATH.findall(part))
        for name in _NAME.findall(part) if sources else ():
            found += [name for each in name.split(".") if not re.search(rf"\b{each}\b", sources)]
    return found


def test_every_test_that_the_rules_name_exists() -> None:
    assert missing_tests(RULES.read_text(encoding="utf-8")) == []


def test_every_rule_names_a_test_and_rules_are_counted_through() -> None:
    rules = _RULE.findall(RULES.read_text(encoding="utf-8"))
    assert [int(number) for number, _ in rules] == list(range(1, len(rules) + 1))
    assert [number for number, text in rules if not _TEST.search(text)] == []


def test_rules_are_referred_to_by_numbers_that_there_are() -> None:
    text = RULES.read_text(encoding="utf-8")
    numbers = re.findall(r"\brules? (\d+)(?:\s+(?:to|and)\s+(\d+))?", text, re.I)
    assert numbers and {int(n) for pair in numbers for n in pair if n} <= set(range(1, len(_RULE.findall(text)) + 1))


@pytest.mark.parametrize("named", ["tests/docs/test_named_code.py::test_gone", "tests/docs/test_gone.py::test_gone"])
def test_a_test_that_is_gone_is_found(named: str) -> None:
    assert missing_tests(f"`{named}`") == [named]


@pytest.mark.parametrize("page", [RULES, TOUR], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    paths = _PATH.findall(page.read_text(encoding="utf-8"))
    assert paths and [path for path in paths if not (ROOT / path).is_file()] == []


def test_the_tour_names_what_is_in_its_files() -> None:
    assert unknown_names(TOUR.read_text(encoding="utf-8")) == []


def test_a_name_that_is_in_no_file_is_found() -> None:
    assert unknown_names("`solve_chain` and `solve_gone` in `solvers/chain/registry.py`") == ["solve_gone"]
