"""What is seen of a planned step on a CUDA device: its timelines, and what is alive at its peak."""

from __future__ import annotations

import pytest

import planner
from planner.explain.measured_step import view_step
from planner.zoo import build
from profiler.workload.workload import Workload

pytestmark = pytest.mark.gpu


def workload() -> Workload:
    return build("gpt2", device="cuda", layers=4, hidden=256, heads=4, seq=128, batch=4)


def test_timelines_and_the_explained_peak_are_those_of_the_allocator() -> None:
    profile = planner.profile(workload())
    plan = planner.solve(profile, "80%", solver="rotor")
    work = workload()
    view = view_step(work, plan)
    with planner.apply(work.model, plan):
        measured = planner.measure(work, repeats=1).peak_bytes
    assert view.planned.peak.peak_bytes == measured <= plan.budget_bytes
    assert view.peak.peak_bytes == sum(part.size_bytes for part in view.peak.parts)
    assert min(part.size_bytes for part in view.peak.parts) > 0
    assert list(dict.fromkeys(span.phase for span in view.planned.spans)) == ["forward", "backward", "optimizer"]
    assert any(part.op.startswith("aten.") and part.what == "kept from forward" for part in view.peak.parts)
