"""Training a U-Net of diffusers within a memory budget: the loop of its tutorial, with accelerate and averaged weights.

python examples/diffusers_unet.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.nn import functional as F

import planner

BLOCKS = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}


def train(budget: str | None) -> list[float]:
    set_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=1)
    model = UNet2DModel(sample_size=32, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8, **BLOCKS)
    # model.enable_gradient_checkpointing() stays off: the plan chooses what runs again.
    noises = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 6)
    averaged = EMAModel(model.parameters(), decay=0.99)
    loader = torch.utils.data.DataLoader(torch.rand(24, 3, 32, 32), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    def step(images: torch.Tensor) -> float:
        noise, times = torch.randn_like(images), torch.randint(1000, (len(images),))
        with accelerator.accumulate(model):
            found = model(noises.add_noise(images, noise, times), times, return_dict=False)[0]
            loss = F.mse_loss(found, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        averaged.step(model.parameters())
        return loss.item()

    first = next(iter(loader))
    if budget is not None:
        workload = planner.Workload(model, step=lambda: step(first))
        planner.auto_checkpoint(workload, budget=budget)  # the lines that are added
        plan, peak = planner.handle_of(model).plan, planner.measure(workload).peak_bytes
        print(f"budget {plan.budget_bytes} bytes, measured {peak} bytes, predicted {plan.predicted_peak_bytes} bytes")
    return [step(images) for images in loader]


if __name__ == "__main__":
    losses = train("75%")
    print("as without a plan" if losses == train(None) else "other than without a plan")
    print("losses", *(f"{loss:.4f}" for loss in losses))
