"""A block that looks at a value to decide what to run (``.item()``): it is planned as a whole, the others op by op.

python examples/value_in_branch.py
"""

import torch
from torch import nn

import planner


class Block(nn.Module):
    def __init__(self, width: int, most: float | None = None) -> None:
        super().__init__()
        self.most = most
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(x))
        if self.most is not None and hidden.abs().mean().item() > self.most:
            hidden = hidden / 2
        return x + self.down(hidden)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(64, most=100.0 if k == 3 else None) for k in range(8)))
    batch = torch.randn(256, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    described = {"loss": lambda y: y.square().mean(), "optimizer": optimizer}

    workload = planner.Workload(model=model, inputs=batch, **described)
    planner.auto_checkpoint(workload, budget="65%")  # the line that is added
    plan = planner.handle_of(model).plan
    measured = planner.measure(workload)
    print(f"budget {plan.budget_bytes} bytes, measured {measured.peak_bytes} bytes")
    print("losses", end="")
    for _ in range(6):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f" {loss:.4f}", end="")
    print()


main()
