"""A loop of accelerate within a memory budget, planned for after prepare; accelerate launch runs it on several ranks.

python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
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
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Sequential(*(Block(64) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(torch.randn(6 * 512, 64), batch_size=512)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(batch), batch.sin())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first = next(iter(loader))  # Profiling trains on it as often as it must, and puts everything back.
    workload = planner.Workload(model=model, step=lambda: step(first), optimizer=optimizer)
    plan = planner.solve(planner.profile(workload), budget="80%")
    planner.apply(model, plan)
    measured = planner.measure(workload)

    losses = [step(batch).item() for batch in loader]
    if accelerator.is_main_process:
        print(f"budget {plan.budget_bytes} bytes, measured {measured.peak_bytes} bytes")
        print("losses", *(f"{loss:.4f}" for loss in losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
