"""Words of tables and messages are in the glossary, from where the command line takes them."""

from __future__ import annotations

from typing import get_args

import pytest

from planner.explain.glossary import explanation, glossary_words
from planner.plans.plan import StageDecision
from tests.support.command_line import done, refused

WORDS = (
    "budget", "peak", "resident", "stage", "option", "recompute", "keep", "offload", "transient", "gap", "headroom",
    "link", "frugal", "feasible", "optimal", "unplanned",
)  # fmt: skip


@pytest.mark.parametrize("word", [*WORDS, *get_args(StageDecision), "lower bound", "interrupted"])
def test_every_word_is_there_and_short(word: str) -> None:
    assert 20 < len(glossary_words()[word]) < 400


@pytest.mark.parametrize(
    ("asked", "word"),
    [("Gap", "gap"), ("lower_bound", "lower bound"), ("stages", "stage"), ("recomputed", "recompute")],
)
def test_other_spellings_and_forms_are_found(asked: str, word: str) -> None:
    assert explanation(asked)[0] == word


def test_the_command_says_one_word_lists_all_and_asks_what_was_meant() -> None:
    assert done("explain", "gap").stdout.startswith("gap  How far")
    listed = " ".join(done("explain").stdout.split()).split(", ")
    assert listed == list(glossary_words())
    assert "did you mean headroom" in refused("explain", "hedroom")
    assert "planner explain lists them" in refused("explain", "xyzzy")
