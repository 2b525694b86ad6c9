"""Progress without a terminal: lines that appear as the work goes on, some seconds apart."""

from __future__ import annotations

import sys

from planner.cli import shell


def test_lines_appear_while_the_work_goes_on(capsys, monkeypatch):
    clock = iter([100.0, 100.1, 101.0, 105.0, 105.5])
    monkeypatch.setattr(shell.time, "monotonic", lambda: next(clock))
    with shell.working() as progress:
        progress("first", 1, 9)
        assert capsys.readouterr().err == "    0 s  first  1/9\n"
        progress("soon after", 2, 9)
        progress("later", 3, 9)
        sys.stdout.write("said by a model\n")
        captured = capsys.readouterr()
        assert captured.err == "    5 s  later  3/9\nsaid by a model\n" and captured.out == ""
    assert capsys.readouterr().err == "    6 s  done  9/9\n"


def test_nothing_is_said_of_work_that_had_no_parts(capsys):
    with shell.working():
        pass
    assert capsys.readouterr().err == ""
