"""What docstrings describe is there: the API reference shows them, and names in them outlive a renaming unseen."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.support.doc_blocks import ROOT

PACKAGES = ("profiler", "solvers", "planner")
_SECTION = re.compile(r"^(\s*)(Args|Attributes):\n((?:\1[ ]+.*\n?|\s*\n)+)", re.M)
_ENTRY = re.compile(r"(\w+(?:, \w+)*)(?::| \()")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def described(text: str, section: str) -> set[str]:
    """The names that begin an entry of a docstring's section."""
    found: set[str] = set()
    for match in _SECTION.finditer(text + "\n"):
        if match[2] != section:
            continue
        lines = [line for line in match[3].splitlines() if line.strip()]
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        entries = (_ENTRY.match(line[indent:]) for line in lines if len(line) - len(line.lstrip()) == indent)
        found.update(name for entry in entries if entry for name in entry[1].split(", "))
    return found


def attributes_of(node: ast.ClassDef) -> set[str]:
    """All names that a class or its methods set, and its methods."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    found |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return found | {each.name for each in ast.walk(node) if isinstance(each, Function)}


def arguments_of(node: Function) -> set[str]:
    own = node.args
    every = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
    return {each.arg for each in every if each is not None}


def missing(source: str) -> Iterator[str]:
    """Names in docstrings of classes and functions that these, or their overloads, do not have."""
    tree = ast.parse(source)
    overloaded: defaultdict[str, set[str]] = defaultdict(set)
    for node in tree.body:
        if isinstance(node, Function) and any(getattr(each, "id", "") == "overload" for each in node.decorator_list):
            overloaded[node.name] |= arguments_of(node)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | Function):
            continue
        text = ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            inits = [each for each in node.body if isinstance(each, Function) and each.name == "__init__"]
            gone = described(text, "Attributes") - attributes_of(node)
            gone |= described(text, "Args") - {name for init in inits for name in arguments_of(init)}
        else:
            gone = described(text, "Args") - arguments_of(node) - overloaded[node.name]
        yield from (f"{node.name}: {name}" for name in sorted(gone))


def test_what_docstrings_describe_is_there():
    sources = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    found = {path.relative_to(ROOT).as_posix(): list(missing(path.read_text(encoding="utf-8"))) for path in sources}
    assert len(found) > 100
    assert {path: names for path, names in found.items() if names} == {}


SOURCE = '''
class Plan:
    """A plan.

    Args:
        old: that it takes no more.

    Attributes:
        kept, gone: of the stages; where
            nested: this is no name.
        seconds: of a step.
    """

    kept: int

    def __init__(self, new):
        self.seconds = new


def solve(chain, *, budget):
    """Solve.

    Args:
        chain, budget: the problem.
        solver: that there is none of.

    Returns:
        other: a word before a colon.
    """
'''


def test_a_name_that_is_gone_is_found():
    assert list(missing(SOURCE)) == ["Plan: gone", "Plan: old", "solve: solver"]
