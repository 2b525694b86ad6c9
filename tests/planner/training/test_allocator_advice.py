"""Advice on allocators: given where a step gets its memory anew or CUDA's allocator wastes much of it, else silent."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from planner.cli import tables
from planner.plans.plan import Plan
from planner.training.allocator_advice import advice_on_allocator, advice_on_malloc
from profiler.measurement import step_measurement
from profiler.measurement.step_measurement import measure
from profiler.workload.workload import Workload
from tests.support.printed_text import text_of
from tests.support.training_runs import trained

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 2**20


@pytest.fixture
def on_linux(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")


def test_more_than_a_tenth_of_what_is_reserved_is_worth_a_word():
    assert advice_on_allocator(90, 100, expandable=False) == ""
    assert "11 B that no tensor uses, 11% of what it has" in advice_on_allocator(89, 100, expandable=False)
    assert advice_on_allocator(10, 100, expandable=True) == "" == advice_on_allocator(10, None, expandable=False)


def test_a_device_that_had_no_memory_left_is_worth_a_word_before_it_runs_out():
    said = advice_on_allocator(90, 95, expandable=False, cache_flushes=2)
    assert "no memory left 2 times" in said and "held 95 B for 90 B" in said and "expandable_segments:True" in said
    said = advice_on_allocator(90, 95, expandable=True, cache_flushes=1)
    assert "no memory left 1 time " in said and "expandable" not in said and "a smaller budget" in said
    assert advice_on_allocator(10, None, expandable=False, cache_flushes=0) == ""


@pytest.mark.usefixtures("on_linux")
def test_more_than_a_whole_peak_anew_is_worth_a_word():
    assert advice_on_malloc(100, 100) == "" == advice_on_malloc(100, None)
    advice = advice_on_malloc(100, 101)
    assert "gets 101 B of memory anew" in advice and "LD_PRELOAD=libtcmalloc_minimal.so.4" in advice


def test_nothing_is_said_where_the_allocator_named_is_not_to_be_had(monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    assert advice_on_malloc(100, 1000) == ""


def test_training_prints_it(files):
    run = trained(Plan.load(files / "plan.json"))
    lines = text_of(tables.training_report(run, "each step gets much anew")).splitlines()
    assert any("allocator" in line and "each step gets much anew" in line for line in lines)
    silent = text_of(tables.training_report(run))
    assert "allocator" not in silent and "reserved" not in silent


def wide(rows: int) -> Workload:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
    return Workload(model=model, inputs=torch.randn(rows, 8), loss=torch.mean)


def test_the_step_with_the_fewest_faults_counts(monkeypatch):
    """Counter readings before and after a step: 0 1, 2 4, 6 9, ..: steps take 1, 2, 3, .."""
    readings = (value for n in count() for value in (n * (n + 1), n * (n + 1) + n + 1))
    monkeypatch.setattr(step_measurement, "faulted_bytes", lambda device: next(readings))
    assert measure(wide(4), repeats=2).faulted_bytes == 1


def glibc_with_small_pages() -> bool:
    """Nobody has told it otherwise, and a page fault is one of a small page."""
    own = not {"GLIBC_TUNABLES", "LD_PRELOAD"} & {*os.environ}
    return own and LARGE_PAGES.exists() and "[madvise]" in LARGE_PAGES.read_text()


# In a process of its own: one that has freed as much serves tensors from that.
MEASURED = f"""
import torch
from profiler.measurement.step_measurement import measure
from profiler.workload.workload import Workload
model = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
rows = {40 * MIB // 4096}  # 40 MiB before and after the activation
print(measure(Workload(model=model, inputs=torch.randn(rows, 8), loss=torch.mean), repeats=1).faulted_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not glibc_with_small_pages(), reason="the allocator or the pages are others")
def test_tensors_above_what_glibc_keeps_come_anew_in_every_step():
    ended = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    assert int(ended.stdout) >= 80 * MIB
