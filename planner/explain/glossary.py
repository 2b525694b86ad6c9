"""The words of the glossary, read from its page."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path

_PAGE = Path(__file__).with_name("glossary.md")  # a link to the page of the docs; in a wheel a copy of it


@cache
def glossary_words() -> dict[str, str]:
    """Every word with what it means, in one line each."""
    _, *entries = _PAGE.read_text(encoding="utf-8").split("\n## ")
    pairs = (entry.split("\n", 1) for entry in entries)
    return {word.strip(): " ".join(text.split()) for word, text in pairs}


def explanation(word: str) -> tuple[str, str]:
    """The word as the glossary has it, and what it means.

    Raises:
        ValueError: the glossary has no such word; names the nearest ones.
    """
    words = glossary_words()
    for spelled in (asked := _plain(word), asked.removesuffix("s"), asked.removesuffix("d"), asked.removesuffix("ed")):
        for known, text in words.items():
            if _plain(known) == spelled:
                return known, text
    from solvers import graph_solver_names, solver_names

    if word in (*solver_names(), *graph_solver_names()):
        return word, "A solver: a method that --solver names; docs/solvers.md says how each works and when to take it."
    near = difflib.get_close_matches(asked, words, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "planner explain lists them"
    raise ValueError(f"WORD: expected a word of the glossary, got {word!r}; {hint}")


def _plain(word: str) -> str:
    return " ".join(word.lower().replace("_", " ").replace("-", " ").split())
