"""TRL's GRPOTrainer within a memory budget: completions are generated in the step, and padded to one length.

python examples/trl_grpo.py
"""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

from planner.integrations.transformers import MemoryBudgetCallback

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
WORDS = {"<eos>": 0, **{f"w{k}": k for k in range(1, 256)}}


def different_words(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def train(folder: str, budget: str | None) -> list[dict[str, float]]:
    set_seed(0)
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    data = Dataset.from_list([{"prompt": " ".join(f"w{(k * j) % 255 + 1}" for j in range(8))} for k in range(64)])
    args = GRPOConfig(
        folder,
        max_steps=6,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        pad_to_multiple_of=16,  # All steps have one shape then, whatever is generated.
        gradient_checkpointing=False,  # TRL's default is True; the plan chooses what runs again.
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES))
    trainer = GRPOTrainer(model, different_words, args, train_dataset=data, processing_class=tokenizer)
    if budget is not None:
        trainer.add_callback(MemoryBudgetCallback(trainer, budget=budget, watch=True))  # the line that is added
    trainer.train()
    return trainer.state.log_history


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        logs = [train(folder, budget) for budget in ("90%", None)]
    steps, without = ([(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry] for log in logs)
    said = {key: value for entry in logs[0] for key, value in entry.items()}
    print(f"budget {said['budget_bytes']} bytes, measured {said['measured_peak_bytes']} bytes", end=", ")
    print(f"predicted {said['predicted_peak_bytes']} bytes")
    print("as without a plan" if steps == without else "other than without a plan")
    print("losses", *(f"{loss:.4f}" for loss, _ in steps))
