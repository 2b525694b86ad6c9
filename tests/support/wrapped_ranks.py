"""Models that are wrapped for ranks where they are built, and the peaks of their steps on ranks that run.

torchrun --nproc-per-node 2 -m tests.support.wrapped_ranks tensor ddp fsdp2
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import planner

KINDS = ("tensor", "ddp", "fsdp2", "2d")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def wrapped(kind: str) -> planner.Workload:
    """The step of one rank of the default group; ``2d``: pairs of tensor parallel ranks, sharded over the pairs."""
    torch.manual_seed(0)
    ranks = dist.get_world_size() if dist.is_initialized() else 2
    model = nn.Sequential(*(Block(128) for _ in range(6)))
    whole: nn.Module = model
    if kind == "ddp":
        whole = DistributedDataParallel(model)
    else:
        pair = 2 if kind == "2d" else ranks if kind == "tensor" else 1
        mesh = init_device_mesh("cpu", (ranks // pair, pair), mesh_dim_names=("data", "tensor"))
        for block in model:
            if pair > 1:
                parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if kind != "tensor":
                fully_shard(block, mesh=mesh["data"])
        if kind != "tensor":
            fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(whole.parameters(), foreach=False)
    return planner.Workload(whole, torch.randn(512, 128), loss=lambda y: y.square().mean(), optimizer=optimizer)


def main() -> None:
    """Print the peak of each kind, on the rank with the least: on another gloo may have let go of a buffer too late."""
    dist.init_process_group()
    for kind in sys.argv[1:]:
        measured = planner.measure(wrapped(kind), repeats=1)
        if dist.get_rank() == 0:
            sys.stdout.write(f"{kind} {min(measured.rank_peak_bytes)}\n")
    dist.barrier()
    time.sleep(0.1)  # Gloo's threads let go of the last backward, or a rank may abort as it ends.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
