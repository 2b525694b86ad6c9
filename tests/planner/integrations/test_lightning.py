"""The callback for Lightning: losses of the fit without it, peaks within the budget, and nothing left behind."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

import planner
from planner.integrations.lightning import MemoryBudgetCallback, TrainingStepModule
from tests.support.exactness import assert_same
from tests.support.lightning_fits import (
    BATCH_BYTES,
    WIDTH,
    Adversarial,
    Classifier,
    Fit,
    Manual,
    PastForward,
    fit,
)

BF16 = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def planned(**options: Any) -> MemoryBudgetCallback:
    return MemoryBudgetCallback("60%", verify=False, **options)


def assert_same_training(got: Fit, expected: Fit) -> None:
    assert got.losses == expected.losses and got.losses
    assert_same([got.values, got.random], [expected.values, expected.random])
    assert got.counters == expected.counters
    assert_unplanned(got.module)


def assert_unplanned(module: LightningModule) -> None:
    assert not [name for name, part in module.named_modules() if {"forward", "training_step"} & set(vars(part))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [(PastForward, {}), (Classifier, BF16), (Manual, {})])
def test_losses_are_those_without_it_and_peaks_are_within_the_budget(kind: Any, options: dict[str, Any]) -> None:
    expected, got = fit(kind, **options), fit(kind, planned(), **options)
    assert_same_training(got, expected)
    assert getattr(got.module, "seen", [0, 1, 2, 3, 4]) == [0, 1, 2, 3, 4]
    assert got.peak_bytes - BATCH_BYTES <= got.facts["budget_bytes"] < 0.7 * expected.peak_bytes


@pytest.mark.slow
def test_the_part_that_is_named_is_planned_where_several_are_trained() -> None:
    with pytest.raises(ValueError, match=r"in this \w+ trains 'generator' and 'discriminator'.*network='generator'"):
        fit(Adversarial, planned())
    with pytest.raises(
        ValueError, match=r"network='net' is no module of the Adversarial; give one of 'generator', 'discriminator'"
    ):
        fit(Adversarial, planned(network="net"))
    got = fit(Adversarial, MemoryBudgetCallback("80%", network="generator", verify=False))
    assert_same_training(got, fit(Adversarial))
    assert got.peak_bytes - BATCH_BYTES <= got.facts["budget_bytes"]


@pytest.mark.slow
def test_training_resumes_from_a_checkpoint_and_loggers_see_the_steps_once(tmp_path: Path) -> None:
    fit(Classifier).trainer.save_checkpoint(tmp_path / "first.ckpt")
    expected = fit(Classifier, checkpoint=tmp_path / "first.ckpt", max_epochs=2)
    logger = CSVLogger(tmp_path)
    got = fit(
        Classifier, planned(), checkpoint=tmp_path / "first.ckpt", max_epochs=2, logger=logger, log_every_n_steps=1
    )
    assert_same_training(got, expected)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert sum("predicted_peak_bytes" in row for row in rows) == 1  # the header
    at = rows[0].split(",").index("loss")
    assert len([row for row in rows[1:] if row.split(",")[at]]) == len(got.losses)


class _Fails(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise RuntimeError("it fails")


class _Iterates(Classifier):
    def training_step(self, dataloader_iter: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.slow
def test_the_plan_goes_where_training_fails() -> None:
    failed = _Fails()
    modules: list[LightningModule] = []
    failed.on_train_start = lambda trainer, module: modules.append(module)  # type: ignore[method-assign]
    callback = planned()
    with pytest.raises(RuntimeError, match="it fails"):
        fit(Classifier, callback, callbacks=[failed])
    assert_unplanned(modules[0])
    callback.remove()
    with pytest.raises(planner.Infeasible, match="is too small") as refusal:
        fit(Classifier, MemoryBudgetCallback(1000, verify=False), callbacks=[failed])
    assert refusal.value.minimum_budget_bytes > 1000
    assert_unplanned(modules[1])


def test_what_no_plan_holds_in_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"takes dataloader_iter.*let it take the batch"):
        fit(_Iterates, planned(), val_check_interval=None)
    module = Classifier()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy._lightning_module = module
    object.__setattr__(trainer._accelerator_connector, "strategy", FSDPStrategy.__new__(FSDPStrategy))
    with pytest.raises(ValueError, match=r"FSDPStrategy is not supported, .*; use ModelParallelStrategy"):
        planned().on_train_batch_start(trainer, module, torch.zeros(1), 0)


def test_copies_of_a_planned_module_run_their_own_training_step() -> None:
    module = Classifier()
    step = TrainingStepModule(module)
    step.install()
    copied = copy.deepcopy(module)
    with torch.no_grad():
        nn.init.zeros_(copied.head.weight)
        nn.init.zeros_(copied.head.bias)
    copied.log = module.log = lambda *_: None  # type: ignore[method-assign]
    batch = (torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.long))
    assert float(copied.training_step(batch, 0).detach()) == pytest.approx(math.log(10))
    step.remove()
    assert_unplanned(module)
