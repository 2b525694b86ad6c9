"""Training within a memory budget, with the weights spread over ranks by fully_shard (FSDP2).

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import planner


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    dist.init_process_group()
    torch.manual_seed(0)  # The same weights on all ranks, of which each keeps its part.
    model = nn.Sequential(*(Block(64) for _ in range(6)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())  # Each has a batch of its own.
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(256, 64)

    # All of these are called on every rank. Each measures, the first one solves, and all have the same plan.
    workload = planner.Workload(model=model, inputs=batch, loss=lambda y: y.square().mean(), optimizer=optimizer)
    # Which blocks keep their weights from forward to backward, for one gather less, is chosen as well.
    plan = planner.solve(planner.profile(workload), budget="70%", reshard="solve")
    planner.apply(model, plan)
    measured = planner.measure(workload)

    for _ in range(5):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"budget {plan.budget_bytes} bytes, measured on each rank {measured.rank_peak_bytes}, loss {loss:.4f}")
    dist.barrier()
    time.sleep(0.1)  # On the CPU: gloo's threads let go of the last backward, or a rank may abort as it ends.
    dist.destroy_process_group()


main()
