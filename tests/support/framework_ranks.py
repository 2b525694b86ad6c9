"""Frameworks' own training loops on the ranks of torchrun, without a budget and with one.

torchrun --nproc-per-node 2 -m tests.support.framework_ranks trainer|lightning-ddp|lightning-fsdp2

Each rank prints a line of JSON: whether its losses are equal, and its plan's fingerprint, budget and measured peak.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

BUDGET = "80%"


def trainer(budget: str | None) -> tuple[list[float], Any]:
    """Five steps of transformers' Trainer, which wraps the model in DistributedDataParallel."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from planner.integrations.transformers import MemoryBudgetCallback

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, num_hidden_layers=3, hidden_size=64, intermediate_size=128, num_attention_heads=4
    )
    rows = torch.randint(0, 256, (96, 64))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=5,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            ddp_backend="gloo",
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        loop = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)  # pyright: ignore[reportArgumentType]
        callback = None
        if budget is not None:
            callback = MemoryBudgetCallback(loop, budget=budget, watch=True)
            loop.add_callback(callback)
        loop.train()
    return [entry["loss"] for entry in loop.state.log_history if "loss" in entry], callback


def lightning(budget: str | None, *, sharded: bool) -> tuple[list[float], Any]:
    """Five steps of Lightning's loop, under DistributedDataParallel or ``fully_shard``."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from planner.integrations.lightning import MemoryBudgetCallback

    class Fitted(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if sharded and self.device_mesh is not None:
                for part in (*self.net.children(), self.net):
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch), batch.sin())
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    torch.manual_seed(1)
    rows: Any = torch.randn(5120, 64)
    data = torch.utils.data.DataLoader(rows, batch_size=512)
    model_parallel = ModelParallelStrategy(2, 1, process_group_backend="gloo")
    strategy = model_parallel if sharded else DDPStrategy(process_group_backend="gloo")
    callback = None if budget is None else MemoryBudgetCallback(budget=budget, watch=True)
    quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    module = Fitted()
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        callbacks=[callback] if callback else [],
        enable_checkpointing=False,
        **quiet,
    ).fit(module, data)
    return module.losses, callback


def main() -> None:
    """Train twice, and say what came of it."""
    kind = sys.argv[1]
    torch.set_num_threads(1)

    def run(budget: str | None) -> tuple[list[float], Any]:
        return trainer(budget) if kind == "trainer" else lightning(budget, sharded=kind == "lightning-fsdp2")

    expected, _ = run(None)
    losses, callback = run(BUDGET)
    plan = callback.training.plan
    said = {
        "losses": len(losses),
        "equal": losses == expected,
        "fingerprint": plan.fingerprint,
        "budget_bytes": plan.budget_bytes,
        "measured_peak_bytes": callback.training.measured_peak_bytes,
    }
    sys.stdout.write(f"\n{json.dumps(said)}\n")
    dist.barrier()  # As in planner/cli/several_ranks.py.
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
