"""The same small models in a loop of accelerate and in a fit of Lightning, for benchmarks: all offline."""

from __future__ import annotations

import gc
import logging
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset
from transformers import set_seed

import planner
from benchmarks.outside_meter import StepPeaks, live_tensor_bytes
from benchmarks.trainer_builds import adapted, llama, padded, rows
from planner.integrations.lightning import MemoryBudgetCallback
from planner.plans.plan import Plan

STEPS, ROWS = 4, 8


def batch_of(number: int) -> dict[str, torch.Tensor]:
    """The rows of one step, made anew."""
    return padded(rows()[number * ROWS : (number + 1) * ROWS])


def accelerate_run(
    budget: str | int | None, *, adapter: str | None = None, precision: str = "no", **sizes: int
) -> tuple[list[float], list[int], Plan | None]:
    """A loop after ``prepare``, from its beginning: losses, peaks of each step from outside, and the plan.

    Args:
        budget: None for a run without a plan.
        adapter: a name in ``ADAPTERS``.
        precision: of accelerate's mixed precision.
        sizes: of the model.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    others_bytes = live_tensor_bytes()
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = adapted(llama(**sizes), adapter)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    batches = [batch_of(number) for number in range(STEPS)]

    def step(number: int = 0) -> float:
        loss = model(**batches[number], use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    set_seed(1)
    if budget is not None:
        planner.auto_checkpoint(
            planner.Workload(model=model, step=step, optimizer=optimizer), budget=budget, verify=False
        )
    meter, losses = StepPeaks(), []
    for number in range(STEPS):
        meter.begin()
        losses.append(step(number))
        meter.end()
    handle = planner.handle_of(model)
    plan = None if handle is None else handle.plan
    if handle is not None:
        handle.remove()
    return losses, [peak - others_bytes for peak in meter.peaks_bytes], plan


class Batches(Dataset[Any]):
    """Whole batches, made when they are asked for."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        return batch_of(index)


class Module(LightningModule):
    """Trains the model with automatic optimization."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.train()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """The model's own loss."""
        return self.model(**batch, use_cache=False).loss

    def configure_optimizers(self) -> Any:
        """Of what is trained."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Observer(Callback):
    """Stands behind the callback that plans: losses, and the peak from the first step on."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.meter = StepPeaks()

    def on_train_batch_start(self, *_: Any) -> None:
        """The first batch is there."""
        if not self.losses:
            self.meter.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """A step is over."""
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, *_: Any) -> None:
        """All are."""
        self.meter.end()


def lightning_run(
    budget: str | int | None, *, adapter: str | None = None, sizes: dict[str, int], **settings: Any
) -> tuple[list[float], list[int], Plan | None]:
    """A fit from its beginning: losses, the peak of all its steps from outside, and the plan.

    Args:
        budget: None for a run without the callback.
        adapter: a name in ``ADAPTERS``.
        sizes: of the model.
        settings: of Lightning's Trainer.
    """
    gc.collect()
    others_bytes = live_tensor_bytes()
    planned = None if budget is None else MemoryBudgetCallback(budget, verify=False)
    observer = Observer()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        callbacks: list[Callback] = [observer] if planned is None else [planned, observer]
        trainer = Trainer(accelerator="cpu", max_epochs=1, logger=False, callbacks=callbacks, **quiet, **settings)
        module = Module(adapted(llama(**sizes), adapter))
        set_seed(1)
        trainer.fit(module, DataLoader(Batches(), batch_size=None))
    # That the first batch goes is not told: it would count twice.
    beside_bytes = others_bytes + sum(tensor.nbytes for tensor in batch_of(0).values())
    peaks = [peak - beside_bytes for peak in observer.meter.peaks_bytes]
    return observer.losses, peaks, None if planned is None else planned.training.plan
