"""Models that accelerate has prepared: alone in mixed precision, and on ranks under DDP and FSDP2 by its own plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState

import planner
from benchmarks.rank_processes import values_of_ranks
from tests.support.late_release import late_bytes
from tests.support.lightning_fits import WIDTH, blocks


@pytest.fixture(autouse=True)
def fresh_accelerator() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """A loop of accelerate after ``prepare``, with accumulation and clipping."""

    def __init__(self, rank: int = 0, **settings: Any) -> None:
        AcceleratorState._reset_state(reset_partial_state=False)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
        torch.manual_seed(0)
        model = blocks(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        draws = torch.Generator().manual_seed(rank)
        self.batches = [torch.randn(128, WIDTH, generator=draws) for _ in range(2)]
        torch.manual_seed(rank)

    def step(self) -> float:
        total = 0.0
        for batch in self.batches:
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.mse_loss(self.model(batch), batch.sin())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                total += loss.item()
        return total

    def values(self) -> list[Any]:
        return [getattr(p, "_local_tensor", p).detach().tolist() for p in self.model.parameters()]


def trained(rank: int, budget: str | None, settings: dict[str, Any]) -> tuple[list[float], list[Any], Any]:
    """Losses, values, and of a plan its fingerprint, budget and measured peak on this rank."""
    loop, facts = Loop(rank, **settings), None
    if budget is not None:
        workload = planner.Workload(model=loop.model, step=loop.step, optimizer=loop.optimizer)
        plan = planner.solve(planner.profile(workload), budget)
        planner.apply(loop.model, plan)
        measured = planner.measure(workload, repeats=1)
        assert any(stage.decision != "keep" for stage in plan.stages)
        facts = plan.fingerprint, plan.budget_bytes, (*measured.rank_peak_bytes, measured.peak_bytes)
    return [loop.step() for _ in range(3)], loop.values(), facts


def _on_ranks(rank: int) -> list[tuple[str, Any, Any]]:
    # As accelerate's launcher sets them; the group is there already.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="1")
    found: list[tuple[str, Any, Any]] = []
    for name in ("DDP", "FSDP2"):

        def settings(name: str = name) -> dict[str, Any]:
            if name == "DDP":
                return {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]}
            os.environ["ACCELERATE_USE_FSDP"] = "true"
            wrapped = ["Block"]
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=wrapped
            )
            return {"fsdp_plugin": plugin}

        expected, got = trained(rank, None, settings()), trained(rank, "85%", settings())
        assert got[:2] == expected[:2], name
        found.append((name, expected[0], got[2]))
    return found


@pytest.mark.slow
def test_a_prepared_loop_in_bfloat16_trains_to_the_same_bits_within_its_budget() -> None:
    expected = trained(0, None, {"mixed_precision": "bf16"})
    losses, values, (_, budget_bytes, peaks) = trained(0, "75%", {"mixed_precision": "bf16"})
    assert (losses, values) == expected[:2]
    assert max(peaks) <= budget_bytes


@pytest.mark.nightly
@pytest.mark.slow
def test_on_ranks_all_have_one_plan_and_losses_are_those_without_it() -> None:
    first, second = values_of_ranks(_on_ranks, group_seconds=60, limit_seconds=400)
    for (name, losses, facts), (_, others, other_facts) in zip(first, second, strict=True):
        assert losses != others, name  # Each rank has its own batches.
        (fingerprint, budget_bytes, peaks), (other_fingerprint, _, _) = facts, other_facts
        assert fingerprint == other_fingerprint, name
        late = late_bytes(blocks(1)) if name == "FSDP2" else 0
        assert max(peaks) <= budget_bytes + late, name
