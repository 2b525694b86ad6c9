"""Pipeline parallel training within a memory budget, each rank with a plan for its own stage.

torchrun --nproc-per-node 2 examples/pipeline_parallel.py
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

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
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.Sequential(*(Block(64) for _ in range(4)))  # this rank's part of the whole model
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    batch, target = torch.randn(512, 64), torch.randn(512, 64)

    def step() -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(*([batch] if rank == 0 else []), target=target if rank == ranks - 1 else None, losses=losses)
        optimizer.step()
        return [loss.detach() for loss in losses]

    workload = planner.Workload(model=model, step=step, optimizer=optimizer)
    plan = planner.solve(planner.profile(workload), budget="80%")  # of the unplanned peak of this rank
    planner.apply(model, plan)
    measured = planner.measure(workload)

    for _ in range(5):
        losses = step()
    print(f"rank {rank}: budget {plan.budget_bytes} bytes, measured {measured.rank_peak_bytes[rank]}")
    if losses:
        print(f"loss {torch.stack(losses).mean():.4f}")
    dist.barrier()
    time.sleep(0.1)  # On the CPU: gloo's threads let go of the last backward, or a rank may abort as it ends.
    dist.destroy_process_group()


main()
