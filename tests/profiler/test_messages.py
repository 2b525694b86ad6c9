"""What goes on is logged at INFO, and seen on stderr where nobody has set up logging; warnings name the user's line."""

from __future__ import annotations

import functools
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from profiler import messages
from profiler.messages import tell, told_by, warn_caller

NAME = "planner"


@pytest.fixture
def loggers(monkeypatch) -> logging.Manager:
    """Loggers as a script finds them that has set up nothing."""
    manager = logging.Manager(logging.RootLogger(logging.WARNING))
    monkeypatch.setattr(messages, "logging", SimpleNamespace(**{**vars(logging), "getLogger": manager.getLogger}))
    return manager


class Kept(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def test_without_any_logging_a_line_goes_to_stderr(loggers, capsys):
    tell(NAME, "solving 100 %s of it")
    assert capsys.readouterr() == ("", "planner: solving 100 %s of it\n")


def test_a_level_silences_it(loggers, capsys):
    loggers.getLogger(NAME).setLevel("WARNING")
    tell(NAME, "solving")
    loggers.getLogger(NAME).setLevel(logging.NOTSET)
    loggers.root.setLevel(logging.ERROR)
    tell(NAME, "solving")
    assert capsys.readouterr().err == ""


def test_handlers_of_the_application_decide(loggers, capsys):
    handler = Kept()
    loggers.root.addHandler(handler)
    tell(NAME, "solving")  # at WARNING, as logging.basicConfig() has it
    assert handler.said == []
    loggers.getLogger(NAME).setLevel("INFO")
    tell(NAME, "solving")
    assert handler.said == ["solving"] and capsys.readouterr().err == ""


def test_a_null_handler_silences_it(loggers, capsys):
    loggers.getLogger(NAME).addHandler(logging.NullHandler())
    tell(NAME, "solving")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rank", "said"), [(0, "planner: solving\n"), (1, "")])
def test_of_several_ranks_the_first_one_speaks(loggers, capsys, monkeypatch, rank, said):
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    tell(NAME, "solving")
    assert capsys.readouterr().err == said


def test_parts_are_told_some_seconds_apart(loggers, capsys, monkeypatch):
    now = iter([0.0, messages.LINE_SECONDS - 1, messages.LINE_SECONDS + 1])
    monkeypatch.setattr(messages.time, "monotonic", lambda: next(now))
    report = told_by(NAME, "profiling")
    for done, what in enumerate(("warm up", "trace", "memory")):
        report(what, done, 14 if done else 0)
    assert capsys.readouterr().err.splitlines() == [
        "planner: profiling: warm up (step 1)",
        "planner: profiling: memory (step 3 of about 14)",
    ]


def test_a_warning_names_the_line_outside_this_project_and_torch() -> None:
    ours: dict[str, object] = {"__name__": "planner.units", "warn_caller": warn_caller}
    exec("def call(): warn_caller('slow', FutureWarning)", ours)
    with pytest.warns(FutureWarning, match="slow") as caught:
        torch.autograd.graph.disable_saved_tensors_hooks("")(functools.partial(ours["call"]))()  # type: ignore[arg-type]
    assert caught[0].filename == __file__
