"""Tensor parallel training within a memory budget.

torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
    torch.manual_seed(0)  # The same weights and batches on all ranks; each keeps its part of the weights.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(Block(64) for _ in range(6)))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randn(256, 64)

    workload = planner.Workload(model=model, inputs=batch, loss=lambda y: y.square().mean(), optimizer=optimizer)
    plan = planner.solve(planner.profile(workload), budget="70%")  # One plan for all ranks; the budget is each one's.
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
