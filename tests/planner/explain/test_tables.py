"""Tables fit the width that there is, and break lines nowhere inside a word or a number."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from planner.explain.tables import PlainTable, facts, plain_table, rows_of_stages
from profiler.records import Phase, StageRecord

NAMES = ("between encoder.stages.0 and encoder.stages.1", "encoder.stages.2.layers.1 to 4, 11", "embedder")


def text_at(width: int, *parts: object) -> str:
    console = Console(width=width, highlight=False, color_system=None)
    with console.capture() as printed:
        for part in parts:
            console.print(part)
    return printed.get()


def table() -> PlainTable:
    made = plain_table(
        "A title of a table that is longer than its rows are", ["stage", "why"], ["predicted peak", "ms"]
    )
    for name in NAMES:
        made.add_row(name, "[green]100 ms a MiB to make again[/green]", "2.57 MiB", "12.89")
    return made


@pytest.mark.parametrize("width", [45, 60, 80, 120])
def test_no_line_breaks_inside_a_word_or_a_number(width: int) -> None:
    text = text_at(width, table(), facts([("budget", "24.6 MiB (25,778,299 bytes): 457 KiB to spare, and more words")]))
    assert max(map(len, text.splitlines())) <= width
    assert not re.search(r" $", text, flags=re.MULTILINE)
    for word in ("encoder.", "stages.", "layers.", "between", "embedder", "predicted", "(25,778,299"):
        assert word in text
    assert text.count("2.57 MiB") == text.count("12.89") == len(NAMES)


def test_what_is_wide_enough_stands_in_one_line_a_row() -> None:
    lines = text_at(120, table()).splitlines()
    assert [line.split("  ")[0].strip() for line in lines[4:7]] == list(NAMES)


def test_without_room_beside_the_numbers_names_stand_above_them() -> None:
    made = plain_table("", ["stage"], ["kept", "boundary", "recomputed", "backward"])
    made.add_row("embedder", "64.0 KiB", "64.0 KiB", "64.0 KiB", "64.0 KiB")
    lines = text_at(45, made).splitlines()
    assert lines[-3].split() == ["embedder"] and lines[-2].split() == ["64.0", "KiB"] * 4


def record(name: str, kept_bytes: int, seconds: float) -> StageRecord:
    return StageRecord(
        name=name, kind="stage", forward=Phase(seconds=seconds), backward=Phase(seconds=0.0), kept_bytes=kept_bytes
    )


def test_equal_stages_are_one_row_and_others_are_not() -> None:
    stages = [
        *(record(f"net.h.{k}", 8, 1.0 + k / 1000) for k in (0, 1, 2, 3)),
        record("net.h.4", 4, 1.0),  # keeps less
        record("net.h.5", 8, 1.02),
        record("net.h.6", 8, 1.5),  # takes longer
        record("net.head", 8, 1.0),  # another kind of name
    ]
    rows = rows_of_stages(stages, lambda stage: stage.kept_bytes, lambda stage: [stage.forward.seconds])
    assert [name for name, _ in rows] == ["h.0 to 3, 5", "h.4", "h.6", "head"]
    assert [len(members) for _, members in rows] == [5, 1, 1, 1]
