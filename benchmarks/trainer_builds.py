"""Trainers of transformers and TRL on small models and tokens of their own, for benchmarks and tests: all offline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from benchmarks.outside_meter import StepPeaks

VOCABULARY = 256
ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1),
    "DoRA": lambda: LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=True),
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
}


def llama(*, layers: int = 2, hidden: int = 32) -> LlamaForCausalLM:
    """With random weights, the same every time."""
    set_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def adapted(model: LlamaForCausalLM, adapter: str | None) -> Any:
    """The model with an adapter of PEFT around it."""
    return model if adapter is None else get_peft_model(model, ADAPTERS[adapter]())


def rows(count: int = 64, lengths: tuple[int, ...] = (64,)) -> Any:
    """Random tokens; lengths take turns."""
    drawn = torch.Generator().manual_seed(1)
    sizes = [lengths[k % len(lengths)] for k in range(count)]
    tokens = [torch.randint(2, VOCABULARY, (size,), generator=drawn).tolist() for size in sizes]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in tokens]


def padded(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest row."""
    longest = max(len(row["input_ids"]) for row in batch)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {k: torch.tensor([row[k] + [v] * (longest - len(row[k])) for row in batch]) for k, v in fill.items()}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words ``t2``, ``t3``, ... are tokens."""
    words = {"<pad>": 0, "<eos>": 1, **{f"t{k}": k for k in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]  # a property in the stub
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def preferences(count: int = 64, length: int = 32) -> Dataset:
    """Prompts with a chosen and a rejected answer."""
    drawn = torch.Generator().manual_seed(2)

    def text(size: int) -> str:
        return " ".join(f"t{k}" for k in torch.randint(2, VOCABULARY, (size,), generator=drawn).tolist())

    return Dataset.from_list(
        [{"prompt": text(length // 2), "chosen": text(length), "rejected": text(length)} for _ in range(count)]
    )


def _settings(folder: str, **settings: Any) -> dict[str, Any]:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    usual = {"output_dir": folder, "use_cpu": True, "max_steps": 4, "learning_rate": 1e-2, "bf16": False}
    return {**quiet, **usual, "per_device_train_batch_size": 8, **settings}


def plain_trainer(
    folder: str,
    *,
    adapter: str | None = None,
    data: Any = None,
    evaluated: Any = None,
    layers: int = 2,
    hidden: int = 32,
    **settings: Any,
) -> Any:
    """The Trainer of transformers.

    Args:
        folder: where it writes.
        adapter: a name in ``ADAPTERS``.
        data: to train on; rows of equal length where none is given.
        evaluated: to evaluate on.
        layers, hidden: of the model.
        settings: of ``TrainingArguments``.
    """
    return Trainer(
        model=adapted(llama(layers=layers, hidden=hidden), adapter),
        args=TrainingArguments(**_settings(folder, **settings)),
        train_dataset=rows() if data is None else data,
        eval_dataset=evaluated,
        data_collator=padded,
    )


def sft_trainer(folder: str, *, adapter: str | None = None, layers: int = 2, hidden: int = 32, **settings: Any) -> Any:
    """TRL's supervised fine-tuning; arguments as for ``plain_trainer``."""
    return SFTTrainer(
        model=llama(layers=layers, hidden=hidden),
        args=SFTConfig(**_settings(folder, gradient_checkpointing=False, **settings)),
        train_dataset=Dataset.from_list([{k: row[k] for k in ("input_ids", "labels")} for row in rows()]),
        processing_class=tokenizer(),
        peft_config=None if adapter is None else ADAPTERS[adapter](),
    )


def dpo_trainer(folder: str, *, adapter: str | None = None, layers: int = 2, hidden: int = 32, **settings: Any) -> Any:
    """TRL's direct preference optimization; the reference is a model of its own, or the one without its adapter."""
    return DPOTrainer(
        model=llama(layers=layers, hidden=hidden),
        ref_model=llama(layers=layers, hidden=hidden) if adapter is None else None,
        args=DPOConfig(**_settings(folder, gradient_checkpointing=False, **settings)),
        train_dataset=preferences(),
        processing_class=tokenizer(),
        peft_config=None if adapter is None else ADAPTERS[adapter](),
    )


class StepMeter(TrainerCallback):
    """Takes the peak of every step of a trainer, from outside; to be added last."""

    def __init__(self) -> None:
        self.steps = StepPeaks()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Its batches are there."""
        self.steps.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Its gradients are gone."""
        self.steps.end()
