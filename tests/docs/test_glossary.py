"""Words of tables and messages are in the glossary."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from planner.plans.plan import StageDecision

WORDS = (
    "budget", "peak", "resident", "stage", "option", "recompute", "keep", "offload", "transient", "gap", "headroom",
    "link", "frugal", "feasible", "optimal", "unplanned",
)  # fmt: skip


@pytest.mark.parametrize("word", [*WORDS, *get_args(StageDecision), "lower bound", "interrupted"])
def test_every_word_is_there_and_short(word: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
    meanings = dict(entry.split("\n", 1) for entry in page.split("\n## ")[1:])
    assert 20 < len(" ".join(meanings[word].split())) < 400
