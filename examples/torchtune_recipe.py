"""A recipe in torchtune's style within a memory budget: one line in setup, which no other part of it sees.

python examples/torchtune_recipe.py
"""

from typing import Any

import torch
from torch import nn

import planner


class FullFinetuneRecipe:
    """Builds everything from a configuration in setup; train goes over the epochs."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg, self.losses = cfg, []

    def setup(self) -> None:
        torch.manual_seed(self.cfg["seed"])
        width = self.cfg["width"]
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        stack = nn.TransformerEncoder(block, self.cfg["layers"], enable_nested_tensor=False)
        vocab = self.cfg["vocab"]
        self._model = nn.Sequential(nn.Embedding(vocab, width), stack, nn.Linear(width, vocab))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=self.cfg["lr"])
        self._loss_fn = nn.CrossEntropyLoss()
        self._data = torch.randint(0, vocab, (self.cfg["steps"], self.cfg["batch"], 33))
        self._plan(self._data[0])

    def _plan(self, batch: torch.Tensor) -> None:
        workload = planner.Workload(model=self._model, step=lambda: self._train_step(batch), optimizer=self._optimizer)
        self.plan = planner.solve(planner.profile(workload), self.cfg["budget"])
        planner.apply(self._model, self.plan)
        self.measured = planner.measure(workload)

    def _loss_step(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self._model(batch[:, :-1])
        return self._loss_fn(logits.flatten(0, 1), batch[:, 1:].flatten())

    def _train_step(self, batch: torch.Tensor) -> float:
        loss = self._loss_step(batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def train(self) -> None:
        self.losses = [self._train_step(batch) for _ in range(self.cfg["epochs"]) for batch in self._data]


if __name__ == "__main__":
    cfg = {"seed": 0, "width": 64, "layers": 4, "vocab": 256, "lr": 1e-3, "steps": 3, "batch": 8, "epochs": 2}
    recipe = FullFinetuneRecipe({**cfg, "budget": "70%"})
    recipe.setup()
    recipe.train()
    print(f"budget {recipe.plan.budget_bytes} bytes, measured {recipe.measured.peak_bytes} bytes")
    print("losses", *(f"{loss:.4f}" for loss in recipe.losses))
