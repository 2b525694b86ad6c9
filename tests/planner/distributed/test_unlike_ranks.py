"""One profile, one plan and one measurement on ranks that differ in speed and in bytes."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.rank_processes import values_of_ranks
from planner.distributed.alike_steps import merged_measurement
from profiler.measurement.step_measurement import Measurement
from tests.support.small_blocks import WIDTH, Residual, Stack

NOTE_BYTES = 2**16


class Pausing(Residual):
    """A block that takes longer on some ranks."""

    def __init__(self, pause_seconds: float) -> None:
        super().__init__(dropout=0.1)
        self.pause_seconds = pause_seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause_seconds)
        return super().forward(x)


def uneven(rank: int) -> planner.Workload:
    """A step that is slower on the first rank, here and there, and takes more memory on the second one."""
    torch.manual_seed(0)
    pauses = [0.004 * (1 - rank) * (k % 2) for k in range(6)]
    model = DistributedDataParallel(Stack([Pausing(pause) for pause in pauses]))
    if rank == 1:
        model.module.note = torch.zeros(NOTE_BYTES, dtype=torch.uint8)  # type: ignore[union-attr]
    torch.manual_seed(rank)
    inputs = torch.randn(256, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    return planner.Workload(model=model, inputs=inputs, loss=lambda y: y.square().mean(), optimizer=optimizer)


def trained(workload: planner.Workload) -> list[Any]:
    torch.manual_seed(3)
    losses = [workload.step() for _ in range(2)]
    return [losses, [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]]


def planned_together(rank: int) -> dict[str, Any]:
    workload = uneven(rank)
    profile = planner.profile(workload)
    plan = planner.solve(profile, "60%")
    verified = planner.verify(workload, plan).plan
    with planner.apply(workload.model, plan):
        measured = planner.measure(workload)
        after = trained(workload)
    frugal = planner.profile(uneven(rank), limit=int(0.8 * profile.unplanned_peak_bytes), menus=False)
    try:
        planner.solve(profile, "1%")
    except planner.Infeasible as error:
        refused = error.minimum_budget_bytes
    else:
        refused = 0
    return {
        "profile": replace(profile, op_records=()),
        "own": planner.measure(uneven(rank)).rank_peak_bytes,
        "plans": [plan.fingerprint, verified.fingerprint],
        "plan": replace(plan, chain=None),
        "refused": refused,
        "measured": measured,
        "same": all(map(torch.equal, after[1], trained(uneven(rank))[1])),
        "frugal": replace(frugal, op_records=()),
    }


@pytest.mark.slow
def test_ranks_that_differ_have_one_profile_and_one_plan():
    first, second = values_of_ranks(planned_together)
    for name in ("profile", "plans", "plan", "refused", "frugal", "own"):
        assert first[name] == second[name], name
    assert first["own"][1] == first["own"][0] + NOTE_BYTES  # They do differ.
    assert first["profile"].unplanned_peak_bytes == first["own"][1]
    assert first["frugal"].frugal and first["frugal"].unplanned_peak_bytes == first["own"][1]
    paused = [stage.forward.seconds for stage in first["profile"].stages if stage.kind == "stage"]
    assert max(paused) >= 0.004  # The slower rank's.
    peaks = first["measured"].rank_peak_bytes
    assert max(peaks) == first["measured"].peak_bytes == second["measured"].peak_bytes
    assert max(peaks) <= first["plan"].budget_bytes
    assert first["plan"].predicted_peak_bytes == max(peaks)
    assert 0 < first["refused"] < first["plan"].budget_bytes
    assert first["same"] and second["same"]


def refused(rank: int) -> dict[str, str]:
    wide = Stack([Residual() for _ in range(2 + rank)])
    workload = uneven(rank)
    other_batch = planner.Workload(
        model=workload.model, inputs=torch.randn(8 * (1 + rank), WIDTH), loss=lambda y: y.square().mean()
    )
    other_model = planner.Workload(model=wide, inputs=torch.randn(8, WIDTH), loss=lambda y: y.square().mean())
    profile = planner.profile(workload, menus=False)
    budgets = [planner.solve(profile, share) for share in ("90%", "55%")]
    frozen = uneven(rank)
    if rank == 1:
        next(frozen.model.parameters()).requires_grad_(False)
    return {
        "batch": said(lambda: planner.profile(other_batch, menus=False)),
        "model": said(lambda: planner.profile(other_model, menus=False)),
        "frozen": said(lambda: planner.measure(frozen)),
        "plan": said(lambda: planner.apply(workload.model, budgets[rank])),
        "budget": said(lambda: planner.solve(profile, ("90%", "55%")[rank])),
        "untouched": str(planner.handle_of(workload.model)),
    }


def said(run) -> str:
    try:
        run()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
def test_ranks_that_are_to_do_other_things_are_refused():
    first, second = values_of_ranks(refused)
    assert first == second
    assert "expected the same shapes of the batch on every rank, got 0 float32[16, 16] on rank 1" in first["batch"]
    assert "expected the same model on every rank" in first["model"] and "blocks.2" in first["model"]
    assert "rank 1" in first["model"] and "frozen" in first["frozen"]
    assert "RankError: apply: expected the same plan on every rank" in first["plan"]
    assert "RankError: solve: expected the same budget on every rank, got 90% on rank 0" in first["budget"]
    assert first["untouched"] == "None"


def test_a_measurement_of_ranks_is_the_worst_with_the_peak_of_each():
    one = Measurement(peak_bytes=5, seconds=0.5, step_seconds=(0.5,), loss=1.0, faulted_bytes=7)
    other = Measurement(peak_bytes=4, seconds=0.75, step_seconds=(0.75,), loss=2.0, faulted_bytes=9)
    merged = merged_measurement([one, other], 1)
    assert merged.rank_peak_bytes == (5, 4)
    assert (merged.peak_bytes, merged.seconds, merged.loss, merged.faulted_bytes) == (5, 0.75, 2.0, 9)
