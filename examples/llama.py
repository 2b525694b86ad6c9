"""A Llama of 12 layers in a plain loop, at half of the memory that its step takes.

python examples/llama.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import planner


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=12, hidden_size=96, intermediate_size=256, num_attention_heads=4, vocab_size=256
    )
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(256, (4, 128))
    batch = {"input_ids": tokens, "labels": tokens}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    planner.auto_checkpoint(planner.Workload(model, batch, optimizer=optimizer), budget="50%")  # the line that is added
    plan = planner.handle_of(model).plan
    measured = planner.measure(planner.Workload(model=model, inputs=batch, optimizer=optimizer))

    losses = []
    for _ in range(6):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"budget {plan.budget_bytes} bytes, measured {measured.peak_bytes} bytes")
    print("losses", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
