"""The largest batch on a CUDA device: limits hold against its own allocator, and a full device is no error."""

from __future__ import annotations

import pytest
import torch

import planner
from planner.zoo import build

pytestmark = pytest.mark.gpu

SETTINGS = {"layers": 6, "hidden": 256, "heads": 4, "seq": 256, "device": "cuda"}


def peak_of(batch: int) -> int:
    return planner.measure(build("gpt2", **SETTINGS, batch=batch), repeats=1).peak_bytes


def test_limits_are_confirmed_on_the_device() -> None:
    budget = peak_of(8)
    found = planner.max_batch("zoo:gpt2", budget, settings=SETTINGS)
    assert found.none.size is not None and found.recompute.size is not None
    assert found.none.size >= 8 and found.recompute.size > found.none.size
    for limit in (found.none, found.recompute):
        assert limit.confirmed and limit.next_fails
        assert limit.peak_bytes is not None and limit.peak_bytes <= budget
    assert abs(found.none.size - (found.none.predicted_size or 0)) <= 1


def test_a_device_that_runs_out_first_is_the_limit(whole_device: None) -> None:
    """The budget is above what the process may have: sizes that run out of memory do not fit."""
    cap = 2 * peak_of(8)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    found = planner.max_batch("zoo:gpt2", 4 * cap, settings=SETTINGS, offload="never")
    assert found.none.confirmed and found.none.peak_bytes is not None
    assert found.none.peak_bytes <= cap
