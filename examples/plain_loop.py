"""A plain PyTorch loop within a memory budget: accumulation, clipping and a schedule, as the loop has them.

python examples/plain_loop.py
"""

import torch
from torch import nn

import planner


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    batch = torch.randn(512, 64)

    def step() -> float:
        total = 0.0
        for part in batch.chunk(2):
            loss = nn.functional.mse_loss(model(part), part.sin()) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return total

    workload = planner.Workload(model=model, step=step, optimizer=optimizer)
    planner.auto_checkpoint(planner.Workload(model=model, step=step, optimizer=optimizer), budget="80%")  # added
    plan = planner.handle_of(model).plan
    measured = planner.measure(workload)  # Whatever it trains is put back.

    losses = [step() for _ in range(6)]
    print(f"budget {plan.budget_bytes} bytes, measured {measured.peak_bytes} bytes")
    print("losses", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
