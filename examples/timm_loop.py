"""timm's training loop within a memory budget: channels_last, autocast, its scaler with clipping, averaged weights.

python examples/timm_loop.py
"""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler

import planner

LAYOUT = torch.channels_last
torch.manual_seed(0)
batches = [(torch.randn(16, 3, 64, 64), torch.randint(10, (16,))) for _ in range(6)]


def train(budget: str | None) -> list[float]:
    torch.manual_seed(0)
    sizes = {"num_classes": 10, "depths": (2, 2, 4, 2), "dims": (16, 32, 48, 64)}
    model = timm.create_model("convnext_atto", drop_path_rate=0.1, **sizes)
    model.to(memory_format=LAYOUT)
    # model.set_grad_checkpointing() stays off: the plan chooses what runs again.
    optimizer = create_optimizer_v2(model, opt="adamw", weight_decay=0.05, lr=1e-3)
    scaler, averaged = NativeScaler(device="cpu"), ModelEmaV3(model, decay=0.9)
    criterion = LabelSmoothingCrossEntropy(0.1)

    def update(images: torch.Tensor, labels: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model(images.contiguous(memory_format=LAYOUT)), labels)
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
        averaged.update(model)
        return loss.item()

    if budget is not None:
        workload = planner.Workload(model, step=lambda: update(*batches[0]))
        planner.auto_checkpoint(workload, budget=budget)  # the lines that are added
        plan, peak = planner.handle_of(model).plan, planner.measure(workload).peak_bytes
        print(f"budget {plan.budget_bytes} bytes, measured {peak} bytes, predicted {plan.predicted_peak_bytes} bytes")
    return [update(*batch) for batch in batches]


def main() -> None:
    losses = train("75%")
    print("as without a plan" if losses == train(None) else "other than without a plan")
    print("losses", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
