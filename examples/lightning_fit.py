"""Lightning's Trainer within a memory budget.

python examples/lightning_fit.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from planner.integrations.lightning import MemoryBudgetCallback


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Fitted(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block(64) for _ in range(6)))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch), batch.sin())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    seed_everything(0, verbose=False)
    budget = MemoryBudgetCallback(budget="70%", watch=True)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=[budget], **quiet)
    model = Fitted()
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(6 * 512, 64), batch_size=512))

    planned = budget.training
    print(f"budget {planned.facts()['budget_bytes']} bytes, measured {planned.measured_peak_bytes} bytes")
    print("losses", *(f"{loss:.4f}" for loss in model.losses))


if __name__ == "__main__":
    main()
