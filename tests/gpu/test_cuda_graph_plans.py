"""Plans of single ops on a CUDA device: budgets, values, copies to host memory, and Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import planner
from planner.zoo import build
from profiler.workload.workload import Workload

pytestmark = pytest.mark.gpu

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 4, "hidden": 256, "heads": 4, "seq": 256, "batch": 8},
    "densenet": {"image": 64, "batch": 16},
    "unet": {"hidden": 16, "image": 128, "batch": 8},
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def work_of(name: str) -> Workload:
    torch.manual_seed(0)
    return build(name, device="cuda", **SMALL[name])


def smallest_of(profile: planner.GraphProfile) -> int:
    with pytest.raises((planner.Infeasible, planner.NothingFound)) as refused:
        planner.solve(profile, 1, time_limit_seconds=5)
    return refused.value.minimum_budget_bytes


def losses(work: Workload) -> list[float]:
    torch.manual_seed(3)
    return [work.step() for _ in range(2)]


@pytest.mark.parametrize("name", SMALL)
def test_losses_are_equal_and_budgets_are_kept(name: str) -> None:
    profile = planner.profile(work_of(name), graph=True)
    expected, least = losses(work_of(name)), smallest_of(profile)
    for budget in (least, (least + profile.unplanned_peak_bytes) // 2):
        plan = planner.solve(profile, budget, time_limit_seconds=5)
        work = work_of(name)
        with planner.apply(work.model, plan):
            assert losses(work) == pytest.approx(expected, rel=1e-4)
            measured = planner.measure(work, repeats=1)
        assert measured.peak_bytes <= budget
        assert abs(plan.predicted_peak_bytes - measured.peak_bytes) <= 0.02 * measured.peak_bytes


def test_values_go_to_host_memory_and_come_back() -> None:
    profile = planner.profile(work_of("gpt2"), graph=True)
    assert profile.link is not None
    least = smallest_of(profile)
    plan = planner.solve(profile, (least + profile.unplanned_peak_bytes) // 2, time_limit_seconds=5, offload="only")
    assert plan.copies
    work, expected = work_of("gpt2"), losses(work_of("gpt2"))
    with planner.apply(work.model, plan):
        assert losses(work) == pytest.approx(expected, rel=1e-4)
        assert planner.measure(work, repeats=1).peak_bytes <= plan.budget_bytes


def test_inductor_keeps_the_budget() -> None:
    work = work_of("gpt2")
    profile = planner.profile(work, graph=True)
    budget = (smallest_of(profile) + profile.unplanned_peak_bytes) // 2
    plan = planner.solve(profile, budget, time_limit_seconds=5, offload="never")  # Inductor's programs send nothing.
    verified = planner.verify(work, plan, backend="inductor", profile=profile)
    with planner.apply(work.model, verified.plan, backend="inductor"):
        assert planner.measure(work, repeats=1).peak_bytes <= budget
