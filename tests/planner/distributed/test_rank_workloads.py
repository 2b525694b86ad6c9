"""Workloads wrapped on several ranks: with whose weights, what their optimizers hold, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.rank_processes import values_of_ranks
from planner.distributed.sharding import sharded_together
from planner.zoo import build


def of_rank(rank: int, **sizes: int) -> planner.Workload:
    return build("mlp", seed=rank, **{"layers": 4, "hidden": 16, "batch": 64, **sizes})


def said(run: Any) -> str:
    try:
        run()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wrapped(rank: int) -> dict[str, Any]:
    batches = of_rank(rank).inputs
    ddp, fsdp2 = sharded_together(of_rank(rank), "ddp"), sharded_together(of_rank(rank), "fsdp2")
    assert isinstance(ddp.model, DistributedDataParallel) and torch.equal(ddp.inputs, batches)
    weights = [p for p in fsdp2.model.parameters() if isinstance(p, DTensor)]
    held = [p for group in fsdp2.optimizer.param_groups for p in group["params"]]
    assert len(weights) == 8 and all(a is b for a, b in zip(weights, held, strict=True))
    seen: dict[str, Any] = {
        "units": [isinstance(module, FSDPModule) for module in fsdp2.model],  # type: ignore[union-attr]
        "whole": [weight.full_tensor().detach() for weight in weights],
        "ddp": [parameter.detach() for parameter in ddp.model.parameters()],
        "twice": said(lambda: sharded_together(ddp, "fsdp2")),
        "other": said(lambda: sharded_together(of_rank(rank, layers=4 + rank), "fsdp2")),
        "step": said(lambda: sharded_together(planner.Workload(model=nn.Linear(2, 2), step=lambda: None), "ddp")),
    }
    before = seen["whole"][0].clone()
    fsdp2.step()
    seen["moved"] = not torch.equal(before, weights[0].full_tensor())
    seen["used"] = said(lambda: sharded_together(fsdp2, "ddp"))
    limits = planner.max_batch(of_rank_at(rank), 150_000, step=32, menus=False, offload="never", shard="fsdp2")
    seen["limits"] = [(limit.size, limit.peak_bytes) for limit in (limits.none, limits.recompute)]
    return seen


def of_rank_at(rank: int) -> Any:
    return lambda batch: of_rank(rank, batch=batch)


@pytest.mark.slow
@pytest.mark.nightly
def test_all_ranks_begin_with_the_first_ones_weights_and_search_together():
    first, second = values_of_ranks(wrapped)
    expected = [parameter.detach() for parameter in of_rank(0).model.parameters()]
    for seen in (first, second):
        assert all(map(torch.equal, seen["whole"], expected)) and all(map(torch.equal, seen["ddp"], expected))
        assert seen["units"] == [True, False] * 4
        assert seen["moved"]
        assert "expected a model without wrappers, got one in DistributedDataParallel" in seen["twice"]
        assert "shard: expected the same model on every rank" in seen["other"]
        assert "got a step of your own, which calls the model without its wrapper" in seen["step"]
        assert "expected an optimizer without states" in seen["used"]
    assert first["limits"] == second["limits"]
    assert all(size >= 32 and peak <= 150_000 for size, peak in first["limits"])
