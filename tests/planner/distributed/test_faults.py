"""What goes wrong on one rank ends all of them in time, in words that name it, or training goes on as it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import planner
from benchmarks.rank_processes import run_on_ranks
from planner.distributed.ranks import planning_among
from tests.support.small_blocks import WIDTH, Residual, Stack

GROUP_SECONDS = 5.0
RANKS = 4  # of which two are killed, one after the other, and a third one at last


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


def built(rank: int, group: Any, *, blocks: int = 4, batch: int = 256) -> planner.Workload:
    torch.manual_seed(0)
    model = DistributedDataParallel(Stack([Residual(dropout=0.1) for _ in range(blocks)]), process_group=group)
    torch.manual_seed(rank)
    inputs, optimizer = torch.randn(batch, WIDTH), torch.optim.AdamW(model.parameters())
    return planner.Workload(model=model, inputs=inputs, loss=squared, optimizer=optimizer)


def in_backward(workload: planner.Workload, fault: Callable[[Tensor], None]) -> None:
    """From now on it happens as the gradient of a block in the middle comes."""
    model: Any = workload.model
    next(model.module.blocks[2].parameters()).register_hook(fault)


def killed(_: Any = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def out_of_memory(_: Tensor) -> None:
    raise torch.OutOfMemoryError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def said(run: Callable[[], Any]) -> str:
    try:
        run()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained(workload: planner.Workload) -> list[Tensor]:
    torch.manual_seed(3)
    losses = [workload.step() for _ in range(2)]
    grads = [p.grad.clone() for p in workload.model.parameters() if p.grad is not None]
    return [torch.tensor(losses), *grads]


def faults(rank: int) -> dict[str, Any]:
    """All of them, those that end a rank last, each of these in a group that has no other ones."""
    timeout = timedelta(seconds=GROUP_SECONDS)
    groups: list[Any] = [dist.new_group(list(range(n)), timeout=timeout) for n in (3, 2, 2)]
    trio, pair, last = groups
    seen: dict[str, Any] = refused(rank)
    workload = built(rank, None)
    if rank == 3:
        in_backward(workload, killed)
    seen["killed while profiling"] = said(lambda: planner.profile(workload, menus=False))
    with planning_among(trio):
        seen["killed while solving"] = said(lambda: solved(rank, trio))
    with planning_among(pair):
        short = built(rank, pair)
        if rank == 1:
            in_backward(short, out_of_memory)
        seen["out of memory"] = said(lambda: planner.measure(short))
    with planning_among(last):
        seen |= killed_in_training(rank, last)
    return seen


def refused(rank: int) -> dict[str, Any]:
    """What is refused on all ranks; training goes on."""
    workload = built(rank, None)
    profile = planner.profile(workload, menus=False)
    plans = [planner.solve(profile, share) for share in ("90%", "55%")]
    seen: dict[str, Any] = {
        "models": said(lambda: planner.profile(single(rank, blocks=3 + rank % 2))),
        "batches": said(lambda: planner.profile(single(rank, batch=32 + 32 * (rank == 1)))),
        "other plans": said(lambda: planner.apply(workload.model, plans[rank % 2])),
    }
    expected = trained(built(rank, None))
    with planner.apply(workload.model, plans[1]):
        seen["two plans"] = said(lambda: planner.apply(workload.model, plans[0]))
        seen["equal"] = all(map(torch.equal, trained(workload), expected))
    return seen


def single(rank: int, *, blocks: int = 4, batch: int = 256) -> planner.Workload:
    """Without the wrapper, which would refuse ranks with other models by itself."""
    model = Stack([Residual() for _ in range(blocks)])
    return planner.Workload(model=model, inputs=torch.randn(batch, WIDTH), loss=squared)


def solved(rank: int, group: Any) -> planner.Plan:
    profile = planner.profile(built(rank, group), menus=False)
    if rank == 2:
        killed()
    return planner.solve(profile, "60%")


def killed_in_training(rank: int, group: Any) -> dict[str, Any]:
    workload = built(rank, group)
    plan = planner.solve(planner.profile(workload, menus=False), "60%")
    if rank == 1:
        in_backward(workload, killed)
    with planner.apply(workload.model, plan):
        return {
            "killed in backward": said(workload.step),
            "killed before": said(lambda: planner.measure(workload)),
        }


@pytest.mark.nightly
@pytest.mark.slow
def test_no_fault_of_one_rank_hangs_the_others_or_goes_unsaid():
    results = run_on_ranks(faults, ranks=RANKS, group_seconds=GROUP_SECONDS)
    first = results[0]
    assert [result.exit_code for result in results] == [0, *[-signal.SIGKILL] * 3], first.traceback
    seen = first.value
    assert seen["equal"]
    for name, words in {
        "models": "RankError: profile: expected the same model on every rank, got",
        "batches": "expected the same shapes of the batch on every rank, got 0 float32[64, 16] on rank 1",
        "other plans": "RankError: apply: expected the same plan on every rank",
        "two plans": "apply: the model has a plan already",
        "killed while profiling": "profile: no answer came from rank 3",
        "killed while solving": "no answer came from rank 2",
        "out of memory": "measure: rank 1 failed, so all ranks stop: ",
        "killed in backward": "RuntimeError: ",
        "killed before": "measure: no answer came from rank 1",
    }.items():
        assert words in seen[name], (name, seen[name])
    assert "can't allocate memory" in seen["out of memory"]
    assert "by peer" in seen["killed in backward"]  # Gloo's own words: the connection is closed, or reset.
