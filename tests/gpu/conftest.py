"""What tests on a CUDA device share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def whole_device() -> Iterator[None]:
    """Whatever a test caps the process to ends with it."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
