"""A step that does not fit: it is profiled a few blocks at a time, and trains within what there is.

python examples/does_not_fit.py
"""

import resource

import psutil
import torch
from torch import nn

import planner

MIB = 2**20
ROOM = 416 * MIB  # with what planning itself loads, for a step of 510 MiB


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(12)))
    batch = torch.randn(16384, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    described = {"loss": lambda y: y.square().mean(), "optimizer": optimizer}
    used = psutil.Process().memory_info().data
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM, before[1]))  # No more for this process.

    workload = planner.Workload(model=model, inputs=batch, **described)
    planner.auto_checkpoint(workload, budget="200MiB")  # the line that is added
    plan = planner.handle_of(model).plan
    measured = planner.measure(workload)
    print(f"unplanned {plan.unplanned_peak_bytes} bytes")
    print(f"budget {plan.budget_bytes} bytes, measured {measured.peak_bytes} bytes")
    print("losses", end="")
    for _ in range(6):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f" {loss:.4f}", end="")
    print()
    resource.setrlimit(resource.RLIMIT_DATA, before)


main()
