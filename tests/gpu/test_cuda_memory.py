"""What only a CUDA device can show of running out of memory: its own refusals, and what its allocator reserves."""

from __future__ import annotations

import pytest
import torch

import planner
from planner.zoo import build

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("whole_device")]

SIZES = {"layers": 6, "hidden": 256, "heads": 4, "seq": 256, "batch": 8}


def test_what_the_allocator_reserves_is_at_least_the_peak() -> None:
    measured = planner.measure(build("gpt2", device="cuda", **SIZES))
    assert measured.reserved_bytes is not None
    assert measured.reserved_bytes >= measured.peak_bytes


def test_a_smaller_device_gets_a_smaller_plan_and_the_same_losses() -> None:
    plan = planner.solve(planner.profile(build("gpt2", device="cuda", **SIZES)), "100%")
    work = build("gpt2", device="cuda", **SIZES)
    torch.manual_seed(3)
    expected = [work.step() for _ in range(3)]
    work = build("gpt2", device="cuda", **SIZES)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_allocated() + 0.8 * plan.predicted_peak_bytes) / total
    )
    torch.manual_seed(3)
    found = planner.train_planned(work, plan, steps=3, retries=9)
    assert found.failures and found.failures[0].allocation_bytes
    assert list(found.losses) == pytest.approx(expected, rel=1e-5)
