"""Progress without a terminal: lines that appear as the work goes on, some seconds apart."""

from __future__ import annotations

import json
import sys
import time

import pytest

from planner.cli import output
from planner.cli.output import Output


def test_lines_appear_while_the_work_goes_on(capsys, monkeypatch):
    clock = iter([100.0, 100.1, 101.0, 105.0, 105.5])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with Output().working() as progress:
        progress("first", 1, 9)
        assert capsys.readouterr().err == "    0 s  first  1/9, about 1 s left\n"
        progress("soon after", 2, 9)
        progress("later", 3, 9)
        sys.stdout.write("said by a model\n")
        captured = capsys.readouterr()
        assert captured.err == "    5 s  later  3/9, about 10 s left\nsaid by a model\n" and captured.out == ""
    assert capsys.readouterr().err == "    6 s  done  9/9\n"


def test_nothing_is_said_of_work_that_had_no_parts(capsys):
    with Output().working():
        pass
    assert capsys.readouterr().err == ""


def test_progress_says_how_long_is_left_and_no_total_that_is_not_known(capsys, monkeypatch):
    seconds = iter([0.0, 10.0, 20.0, 30.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(seconds))
    with Output().working() as progress:
        progress("first", 1, 4)
        progress("search", 5, 0)
    assert capsys.readouterr().err.splitlines() == [
        "   10 s  first  1/4, about 30 s left",
        "   20 s  search  5 done",
        "   30 s  done  6/6",
    ]


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", output.PLAIN_WIDTH), ("wide", output.PLAIN_WIDTH)])
def test_piped_output_is_as_wide_as_columns_says_and_has_no_trailing_blanks(capsys, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    Output().show("word " * 40)
    lines = capsys.readouterr().out.splitlines()
    assert width - 5 < max(map(len, lines)) <= width and all(line == line.rstrip() for line in lines)


def test_a_search_says_for_how_long_it_has_searched_of_how_long_it_may(capsys, monkeypatch):
    monkeypatch.setattr(output, "SEARCH_LINE_SECONDS", 0.01)
    monkeypatch.setattr(output, "LINE_SECONDS", 0.0)
    with Output().searching(60.0):
        time.sleep(0.2)
    first = capsys.readouterr().err.splitlines()[0]
    assert first.split() == ["0", "s", "search,", "seconds", "0/60"]
    with Output().searching(0.0):
        time.sleep(0.2)
    assert capsys.readouterr().err.splitlines()[0].split() == ["0", "s", "search,", "seconds"]


def test_results_for_a_person_leave_stdout_to_a_json_document(capsys):
    out = Output(as_json=True)
    out.show("a table")
    out.show_json({"status": "done"})
    captured = capsys.readouterr()
    assert captured.err == "a table\n" and json.loads(captured.out) == {"status": "done"}
