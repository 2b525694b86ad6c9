"""TRL's SFTTrainer within a memory budget; DPOTrainer takes the same line.

python examples/trl_sft.py
"""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from planner.integrations.transformers import MemoryBudgetCallback


def main() -> None:
    set_seed(0)
    config = LlamaConfig(
        num_hidden_layers=6, hidden_size=64, intermediate_size=256, num_attention_heads=4, vocab_size=256
    )
    words = Tokenizer(models.WordLevel({"<eos>": 0, **{f"w{k}": k for k in range(1, 256)}}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")
    data = Dataset.from_list([{"text": " ".join(f"w{(k * j) % 255 + 1}" for j in range(31))} for k in range(64)])
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder,
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_checkpointing=False,  # TRL's default is True; the plan chooses what runs again.
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = SFTTrainer(LlamaForCausalLM(config), args, train_dataset=data, processing_class=tokenizer)
        trainer.add_callback(MemoryBudgetCallback(trainer, budget="90%", watch=True))  # the line that is added
        trainer.train()

    log = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    print(f"budget {log['budget_bytes']} bytes, measured {log['measured_peak_bytes']} bytes")
    print("losses", *(f"{entry['loss']:.4f}" for entry in trainer.state.log_history if "loss" in entry))


if __name__ == "__main__":
    main()
