"""Pipelines under a plan for each rank's stage, on two ranks: exact, and within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import planner
from benchmarks.outside_meter import OutsideMeter
from benchmarks.rank_processes import values_of_ranks
from tests.support.parallel_models import PipelineLoop, Transformer, next_words, trained

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICRO_BATCHES = 4


def stepped(loop: PipelineLoop) -> Any:
    def step(batch: Tensor) -> Tensor | None:
        loop.batch = batch
        return loop.step()

    return step


def interleaved(rank: int) -> planner.Workload:
    """Two stages on each rank."""
    model = Transformer(1, first=rank == 0, last=False)
    stages: list[Any] = [PipelineStage(model, rank + 2 * k, 4, torch.device("cpu")) for k in range(2)]
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=next_words)
    return planner.Workload(model=model, step=lambda: schedule.step())


def under_plans(rank: int, name: str) -> dict[str, Any]:
    schedule = SCHEDULES[name]
    loop = PipelineLoop(schedule, MICRO_BATCHES)
    expected = trained(loop.model, stepped(loop))
    loop = PipelineLoop(schedule, MICRO_BATCHES)
    profile = planner.profile(planner.Workload(model=loop.model, step=loop.step, optimizer=loop.optimizer))
    plans = []
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, "1KiB")
    for budget in ("100%", refused.value.minimum_budget_bytes):
        plan = planner.solve(profile, budget)
        loop = PipelineLoop(schedule, MICRO_BATCHES)
        with planner.apply(loop.model, plan):
            got = trained(loop.model, stepped(loop))
        with OutsideMeter() as meter:
            loop = PipelineLoop(schedule, MICRO_BATCHES)
            with planner.apply(loop.model, plan):
                meter.begin()
                for _ in range(2):
                    loss = loop.step()
        del loss
        same = len(got) == len(expected) and all(map(torch.equal, expected, got))
        plans.append((same, meter.peak_bytes, plan.budget_bytes, plan.predicted_peak_bytes, plan.recomputed_ops))
    if name == "1f1b":  # Refused before anything runs.
        with pytest.raises(
            planner.errors.ProfileError, match=r"1F1B, got ScheduleInterleaved1F1B; .* take one of these"
        ):
            planner.profile(interleaved(rank))
    return {"plans": plans, "most_beside": max(count for count, _ in profile.in_flight)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.nightly
def test_each_stage_has_a_plan_and_all_of_its_micro_batches_fit(name: str) -> None:
    both = values_of_ranks(under_plans, name)
    # GPipe goes forward with all before the first goes backward; in 1F1B the last stage has one at a time.
    assert [said["most_beside"] for said in both] == {"gpipe": [3, 3], "1f1b": [1, 0]}[name]
    for said in both:
        assert all(same for same, *_ in said["plans"])
        assert all(peak <= predicted <= budget for _, peak, budget, predicted, _ in said["plans"]), said["plans"]
        assert said["plans"][-1][-1] > 0
