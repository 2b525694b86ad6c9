"""Advice on allocators: given where a step gets its memory anew or CUDA's allocator wastes much of it, else silent."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
import torch

from planner import report
from planner.allocator_advice import GLIBC, advice_on_allocator, advice_on_malloc
from profiler import measurement
from profiler.measurement import measure
from profiler.workload import Workload
from tests.planner.texts import text_of

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 2**20


@pytest.fixture
def untold(monkeypatch):
    monkeypatch.delenv(GLIBC[0], raising=False)
    monkeypatch.setattr("planner.allocator_advice._has_glibc", lambda: True)


def test_more_than_a_tenth_of_what_is_reserved_is_worth_a_word():
    assert advice_on_allocator(90, 100, expandable=False) == ""
    assert "11 B that no tensor uses, 11% of what it has" in advice_on_allocator(89, 100, expandable=False)
    assert advice_on_allocator(10, 100, expandable=True) == "" == advice_on_allocator(10, None, expandable=False)


@pytest.mark.usefixtures("untold")
def test_more_than_a_whole_peak_anew_is_worth_a_word():
    assert advice_on_malloc(100, 100) == "" == advice_on_malloc(100, None)
    advice = advice_on_malloc(100, 101)
    assert "gets 101 B of memory anew" in advice and "set GLIBC_TUNABLES=glibc.malloc" in advice


@pytest.mark.usefixtures("untold")
def test_nothing_is_said_to_those_who_have_set_it_or_have_another_library(monkeypatch):
    monkeypatch.setenv(*GLIBC)
    assert advice_on_malloc(100, 1000) == ""
    monkeypatch.delenv(GLIBC[0])
    monkeypatch.setattr("planner.allocator_advice._has_glibc", lambda: False)
    assert advice_on_malloc(100, 1000) == ""


def test_training_prints_it():
    document = {
        "losses": [1.5], "budget_bytes": 100, "predicted_peak_bytes": 90, "measured_peak_bytes": 95,
        "predicted_seconds": 0.01, "measured_seconds": 0.012, "unplanned_seconds": 0.008,
        "allocator_advice": "each step gets much anew",
    }  # fmt: skip
    lines = text_of(report.training_report(document)).splitlines()
    assert any("allocator" in line and "each step gets much anew" in line for line in lines)
    silent = text_of(report.training_report({**document, "allocator_advice": ""}))
    assert "allocator" not in silent and "reserved" not in silent


def wide(rows: int) -> Workload:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1))
    return Workload(model=model, inputs=torch.randn(rows, 8), loss=torch.mean)


def test_the_step_with_the_fewest_faults_counts(monkeypatch):
    """Counter readings before and after a step: 0 1, 2 4, 6 9, ..: steps take 1, 2, 3, .."""
    readings = (value for n in count() for value in (n * (n + 1), n * (n + 1) + n + 1))
    monkeypatch.setattr(measurement, "faulted_bytes", lambda device: next(readings))
    assert measure(wide(4), repeats=2).faulted_bytes == 1


@pytest.mark.skipif(
    GLIBC[0] in os.environ or "[madvise]" not in (LARGE_PAGES.read_text() if LARGE_PAGES.exists() else ""),
    reason="the system's allocator is told otherwise, or its pages are large",
)
def test_tensors_above_what_glibc_keeps_come_anew_in_every_step():
    measured = measure(wide(40 * MIB // 4096), repeats=1)  # 40 MiB before and after the activation
    assert measured.faulted_bytes is not None
    assert measured.faulted_bytes >= 80 * MIB
