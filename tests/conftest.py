"""What every test starts from: fixed threads and seeds, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import planner
from planner import zoo
from planner.plans import call_programs, exact_programs, profiling
from solvers.chain import registry
from tests.support.command_line import SMALL, TARGETS, done

SLOW_FOLDERS = {
    "system",
    "benchmarks",
}  # of real models; elsewhere slow tests are marked one by one
SEARCHES = [
    (call_programs, "_MENU_SECONDS"),
    (exact_programs, "EXACT_SECONDS"),
    (profiling, "_SECONDS"),
    (registry, "AUTO_ILP_SECONDS"),
]
SEARCH_SHARE = 0.1  # of the time: plans of tests have to be right, and need not be the fastest there are
LONG_COLLECTION = 0.015  # seconds
THREADS = 1  # the same on every machine, as sums depend on it; two processes of tests share two cores


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(THREADS)
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # of the processes that tests start
    for module, seconds in SEARCHES:
        setattr(module, seconds, SEARCH_SHARE * getattr(module, seconds))
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()  # No secret of the tests' in the user's own state folder.


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW_FOLDERS & set(item.path.relative_to(config.rootpath).parts):
            item.add_marker(pytest.mark.slow)
    if not os.environ.get("RELEASE_CHECK"):
        left_out = pytest.mark.skip(reason="make release-check runs it")
        for item in items:
            if item.get_closest_marker("release"):
                item.add_marker(left_out)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


class Collections:
    """Whether the last full garbage collection took long, which they say themselves."""

    def __init__(self) -> None:
        self.took_long, self.began = True, 0.0
        gc.callbacks.append(self.told)

    def told(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self.began = time.perf_counter()
        else:
            self.took_long = time.perf_counter() - self.began > LONG_COLLECTION


COLLECTIONS = Collections()


@pytest.fixture(autouse=True)
def short_collections(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there by now stays: profiling and measuring collect garbage first, and need not look through it.

    Half a second each, with all that transformers and Dynamo import and what pytest keeps of the tests before. To count
    what is frozen takes a tenth of that, so profiling is told that something is.
    """
    if COLLECTIONS.took_long:
        gc.collect()
        gc.freeze()
        COLLECTIONS.took_long = False
    if "nothing_frozen" not in request.fixturenames:
        monkeypatch.setattr(gc, "get_freeze_count", lambda: 1_000_000)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process where no test has run."""
    gc.unfreeze()
    yield
    COLLECTIONS.took_long = True


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model's profile and plan, made by the commands themselves, and a file of targets."""
    folder = tmp_path_factory.mktemp("cli")
    done("profile", "zoo:mlp", *SMALL, "-o", folder / "profile.json")
    done("solve", folder / "profile.json", "--budget", "85%", "-o", folder / "plan.json")
    (folder / "targets.py").write_text(TARGETS)
    return folder


@pytest.fixture(scope="session")
def blocks() -> planner.Profile:
    """The profile of a small GPT-2 whose blocks are its stages, with their menus."""
    work = zoo.build("gpt2", layers=3, batch=2, hidden=32, seq=32, vocab=100)
    return planner.profile(work, stages=["transformer.h.*"])


@pytest.fixture(autouse=True)
def width_of_plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is as wide as elsewhere: pytest-xdist sets COLUMNS."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def folders_of_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a target joins ``sys.path``, as that of a script does; what other tests start has it not."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # libraries under test may draw from the global generator
    torch.manual_seed(0)
