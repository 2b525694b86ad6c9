"""Lightning modules as people write them, and what a fit of them gives: losses, values, and the peak from outside."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.outside_meter import StepPeaks, live_tensor_bytes

WIDTH = 32
ROWS = 256
BATCH_BYTES = ROWS * (WIDTH * 4 + 8)
BATCHES = 5


class Block(nn.Module):
    """Draws random numbers, so that a run that consumes some shows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def blocks(count: int) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(count)])


class Classifier(LightningModule):
    """Automatic optimization through ``forward``, with a schedule and logged values."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = blocks(5), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels = batch
        loss = nn.functional.cross_entropy(self(x), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, labels = batch
        self.log("validation", nn.functional.cross_entropy(self(x), labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class PastForward(Classifier):
    """Calls two networks itself, returns more than the loss, and keeps counters and tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.seen = torch.zeros(50_000), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, labels = batch
        output = self.head(self.net(x))
        loss = nn.functional.cross_entropy(output, labels)
        self.memory += 1
        self.seen.append(batch_idx)
        self.log_dict({"loss": loss, "noise": torch.rand(())})
        return {"loss": loss, "output": output.detach()}


class Manual(Classifier):
    """Manual optimization of one network."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, labels = batch
        optimizer: Any = self.optimizers()
        loss = nn.functional.cross_entropy(self(x), labels)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.log("loss", loss)


class Adversarial(LightningModule):
    """Two networks that are trained in turns, as in Lightning's own example."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = blocks(5), nn.Sequential(Block(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.generator(x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, noise = batch[0], torch.randn_like(batch[0])
        generator, discriminator = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        self.toggle_optimizer(generator)
        fooled = _judged(self.discriminator(self(noise)), True)
        generator.zero_grad()
        self.manual_backward(fooled)
        generator.step()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(discriminator)
        judged = _judged(self.discriminator(x), True) + _judged(self.discriminator(self(noise).detach()), False)
        discriminator.zero_grad()
        self.manual_backward(judged)
        discriminator.step()
        self.untoggle_optimizer(discriminator)
        self.log("loss", fooled + judged)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.generator, self.discriminator)]


def _judged(scores: Tensor, real: bool) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


class Batches(Dataset[Any]):
    """Whole batches, made when they are asked for: nothing of a data set is there; the last one is smaller."""

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        rows, draws = ROWS if index < BATCHES - 1 else ROWS // 4, torch.Generator().manual_seed(index)
        return torch.randn(rows, WIDTH, generator=draws), torch.randint(0, 10, (rows,), generator=draws)


class Observer(Callback):
    """Stands behind the callback that plans: sees losses, what that one says, and the peak from the first step on."""

    def __init__(self, planned: Any) -> None:
        self.losses: list[float] = []
        self.facts: dict[str, float] = {}
        self.meter = StepPeaks()
        self._planned = planned

    def on_train_batch_start(self, *_: Any) -> None:
        if self._planned is not None and not self.facts:
            self.facts = self._planned.training.facts()
        if not self.losses:
            self.meter.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_train_end(self, *_: Any) -> None:
        self.meter.end()


@dataclass(frozen=True, slots=True)
class Fit:
    """What came out of a fit.

    Attributes:
        peak_bytes: from the first step on. That the first batch goes is not told, so it counts twice.
    """

    module: LightningModule
    losses: list[float]
    values: dict[str, Any]
    counters: Any
    random: Any
    peak_bytes: int
    facts: dict[str, float]
    trainer: Trainer


def fit(
    kind: type[LightningModule],
    planned: Any = None,
    *,
    checkpoint: Any = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Fit:
    """Train a module from fixed weights and random numbers, with validation between steps where it has one."""
    gc.collect()
    others_bytes = live_tensor_bytes()
    torch.manual_seed(0)
    module, observer = kind(), Observer(planned)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"max_epochs": 1, "logger": False, "val_check_interval": 2, "num_sanity_val_steps": 0} | options
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*(smaller than the profiled one|LeafSpec).*")
        trainer = Trainer(
            accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*([] if planned is None else [planned]), observer, *callbacks], **options,
        )  # fmt: skip
        seed_everything(1, verbose=False)
        loader = DataLoader(Batches(), batch_size=None)
        validation = DataLoader(Batches(), batch_size=None) if isinstance(module, Classifier) else None
        trainer.fit(module, loader, validation, ckpt_path=checkpoint)
    values = {name: value.clone() for name, value in module.state_dict().items()}
    return Fit(
        module, observer.losses, values, trainer.fit_loop.state_dict(), torch.get_rng_state(),
        max(observer.meter.peaks_bytes) - others_bytes, observer.facts, trainer,
    )  # fmt: skip
