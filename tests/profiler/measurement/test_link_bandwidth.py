"""The link meter: what has no link, and what the host may hold."""

from __future__ import annotations

import pytest
import torch

from profiler.measurement.device_memory import measure_link, pinnable_bytes


def test_a_cpu_has_no_link() -> None:
    assert measure_link(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("free_bytes", "expected"),
    [(0, 0), (1, 1), (70 * 10**9, 2**36), (2**36 - 1, 2**35), (2**36, 2**36), (2**36 + 1, 2**36)],
)
def test_what_may_be_pinned_is_still_free_when_the_allocator_has_rounded_it_up(free_bytes: int, expected: int) -> None:
    assert pinnable_bytes(free_bytes) == expected
    rounded_up = 1 << max(0, expected - 1).bit_length()
    assert rounded_up <= max(1, free_bytes)
