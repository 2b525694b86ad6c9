"""The Trainer of transformers within a memory budget.

python examples/trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from planner.integrations.transformers import MemoryBudgetCallback


def main() -> None:
    set_seed(0)
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=256
    )
    rows = torch.randint(0, 256, (64, 64))
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=6,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=data)
        trainer.add_callback(MemoryBudgetCallback(trainer, budget="70%", watch=True))  # the line that is added
        trainer.train()

    log = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    print(f"budget {log['budget_bytes']} bytes, measured {log['measured_peak_bytes']} bytes")
    print("losses", *(f"{entry['loss']:.4f}" for entry in trainer.state.log_history if "loss" in entry))


if __name__ == "__main__":
    main()
