"""Adapters of PEFT under ``planner.apply``: frozen bases, and a first block whose input needs no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import planner
from benchmarks.outside_meter import OutsideMeter
from benchmarks.trainer_builds import adapted, llama, padded, rows
from tests.support.nightly import by_day


def workload(adapter: str) -> planner.Workload:
    model = adapted(llama(layers=3), adapter).train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, foreach=False)
    torch.manual_seed(1)
    return planner.Workload(model=model, inputs=padded(rows(8, (48,))), optimizer=optimizer)


def trained(adapter: str, plan: planner.Plan | None = None) -> tuple[int, list[float], dict[str, Any]]:
    with OutsideMeter() as meter:
        work = workload(adapter)
        handle = None if plan is None else planner.apply(work.model, plan)
        losses = [work.step() for _ in range(2)]
        meter.begin()
        losses += [work.step() for _ in range(2)]
        if handle is not None:
            handle.remove()
        values = {name: value.tolist() for name, value in work.model.named_parameters() if value.requires_grad}
        del work, handle
    return meter.peak_bytes, losses, values


@pytest.mark.slow
@pytest.mark.parametrize("adapter", by_day(["LoRA", "DoRA", "prompt tuning"], []))
def test_adapters_train_to_the_same_bits_within_the_budget(adapter: str) -> None:
    profile = planner.profile(workload(adapter))
    unplanned_bytes, expected, values = trained(adapter)
    assert unplanned_bytes == profile.unplanned_peak_bytes
    plan = planner.solve(profile, "75%")
    assert any(stage.decision != "keep" for stage in plan.stages)
    peak_bytes, losses, planned_values = trained(adapter, plan)
    assert (losses, planned_values) == (expected, values)
    assert peak_bytes <= plan.predicted_peak_bytes <= plan.budget_bytes
