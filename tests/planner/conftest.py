"""Fixtures of the planner's tests."""

from __future__ import annotations

import pytest

import planner
from planner import zoo
from tests.planner.command_line import SMALL, TARGETS, done


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A small model's profile and plan, made by the commands themselves, and a file of targets."""
    folder = tmp_path_factory.mktemp("cli")
    done("profile", "zoo:mlp", *SMALL, "-o", folder / "profile.json")
    done("solve", folder / "profile.json", "--budget", "85%", "-o", folder / "plan.json")
    (folder / "targets.py").write_text(TARGETS)
    return folder


@pytest.fixture(scope="session")
def blocks():
    """The profile of a small GPT-2 whose blocks are its stages, with their menus."""
    work = zoo.build("gpt2", layers=3, batch=2, hidden=32, seq=32, vocab=100)
    return planner.profile(work, stages=["transformer.h.*"])
