"""A U-Net, whose long skips join layers far apart: planned by the same line as a chain of blocks.

python examples/unet.py
"""

import itertools

import torch
from torch import nn

import planner


def convolutions(channels: int, made: int) -> nn.Sequential:
    first, second = nn.Conv2d(channels, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
    return nn.Sequential(first, nn.BatchNorm2d(made), nn.ReLU(True), second, nn.BatchNorm2d(made), nn.ReLU(True))


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        self.down = nn.ModuleList(convolutions(a, b) for a, b in itertools.pairwise((3, *widths)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.merge = nn.ModuleList(convolutions(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for k, down in enumerate(self.down):
            x = down(nn.functional.max_pool2d(x, 2) if k else x)
            skips.insert(0, x)
        for up, merge, skip in zip(reversed(self.up), reversed(self.merge), skips[1:], strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    model = UNet()
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(2, (4, 64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    described = {"loss": lambda out: nn.functional.cross_entropy(out, labels), "optimizer": optimizer}

    workload = planner.Workload(model=model, inputs=images, **described)
    planner.auto_checkpoint(workload, budget="75%")  # the line that is added
    plan = planner.handle_of(model).plan
    measured = planner.measure(workload)
    print(f"budget {plan.budget_bytes} bytes, measured {measured.peak_bytes} bytes")
    print("losses", end="")
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f" {loss:.4f}", end="")
    print()


main()
