"""A contrastive loss over an image and a text tower, in the shape of open_clip's loop, within a memory budget.

python examples/two_towers.py
"""

import torch
from torch import nn

import planner


def tower() -> nn.TransformerEncoder:
    block = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(block, 3, enable_nested_tensor=False)


class TwoTowers(nn.Module):  # Both run in one call of the model, which is what a plan is made for.
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, 64, 8, 8), nn.Embedding(256, 64)
        self.visual, self.transformer = tower(), tower()
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.visual(self.patches(images).flatten(2).transpose(1, 2)), self.transformer(self.words(texts))
        return (*(nn.functional.normalize(each.mean(1), dim=-1) for each in found), self.logit_scale.exp())


def train(budget: str | None) -> list[float]:
    torch.manual_seed(0)
    model, scaler = TwoTowers(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(16, 3, 64, 64), torch.randint(256, (16, 16))) for _ in range(6)]

    def step(images: torch.Tensor, texts: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            seen, read, scale = model(images, texts)
            logits, pairs = scale * seen @ read.T, torch.arange(len(images))
            loss = nn.functional.cross_entropy(logits, pairs) / 2 + nn.functional.cross_entropy(logits.T, pairs) / 2
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        model.logit_scale.data.clamp_(0, 4.6052)  # ln 100
        return loss.item()

    if budget is not None:
        workload = planner.Workload(model, step=lambda: step(*batches[0]))
        planner.auto_checkpoint(workload, budget=budget)  # the lines that are added
        plan, peak = planner.handle_of(model).plan, planner.measure(workload).peak_bytes
        print(f"budget {plan.budget_bytes} bytes, measured {peak} bytes, predicted {plan.predicted_peak_bytes} bytes")
    return [step(*batch) for batch in batches]


losses = train("80%")
print("as without a plan" if losses == train(None) else "other than without a plan")
print("losses", *(f"{loss:.4f}" for loss in losses))
