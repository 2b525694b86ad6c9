"""What every test starts from: fixed threads and seeds, and GPU tests skipped where there is no GPU."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

THREADS = 2  # the same on every machine: reductions split over threads, so the last bits of a sum depend on it


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(THREADS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays: profiling and measuring collect garbage first, and need not look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # libraries under test may draw from the global generator
    torch.manual_seed(0)
