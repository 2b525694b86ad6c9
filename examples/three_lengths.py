"""Batches of three lengths: one is given to plan on, the shortest beside it, and the third gets a plan of its own.

python examples/three_lengths.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import planner


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=192)
    model = GPT2LMHeadModel(config).train()
    tokens = [torch.randint(256, (4, length)) for length in (64, 128, 192)]
    batches = [{"input_ids": each, "labels": each} for each in tokens]
    optimizer = torch.optim.AdamW(model.parameters())

    planner.auto_checkpoint(  # the line that is added
        planner.Workload(model, batches[-1], optimizer=optimizer), budget="60%", dynamic=True, sizes=[batches[0]]
    )
    budget = max(plan.budget_bytes for plan in planner.handle_of(model).plans.values())
    peaks = [
        planner.measure(planner.Workload(model=model, inputs=batch, optimizer=optimizer), repeats=1).peak_bytes
        for batch in batches
    ]
    print(f"budget {budget} bytes, measured {max(peaks)} bytes")
    print("losses", end="")
    for number in range(6):
        loss = model(**batches[number % 3]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f" {loss:.4f}", end="")
    print()


main()
