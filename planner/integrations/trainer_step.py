"""One update of a transformers Trainer, as its loop runs it, as a function that can be run any number of times."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher

from profiler.workload.tensor_trees import map_tensors

# Of a trainer: no state of a step, and long to go through.
_NO_STATE = ("callback_handler", "train_dataset", "eval_dataset", "processing_class", "data_collator")


class TrainerStep:
    """Runs ``training_step`` on micro-batches, clips, steps the optimizer and clears gradients.

    Of several micro-batches two are enough: all but the first find gradients there. One that is to be measured comes
    last.

    Args:
        trainer: in training, at the begin of a step.
        batches: that it has collected for this step; all stay there, as in its loop.
        batch: the one of them that the plan is for.
        items: what it has counted in them.
    """

    def __init__(self, trainer: Any, batches: Sequence[Any], batch: Any, items: Any) -> None:
        self._trainer = weakref.ref(trainer)
        self.model = trainer.model_wrapped
        # What its step may change, its containers too: found here by what goes through a function's referents.
        self._state = SimpleNamespace(**{n: value for n, value in vars(trainer).items() if n not in _NO_STATE})
        self._batches, self._items = list(batches), items
        self._run = [*[other for other in batches if other is not batch][:1], batch]
        self._ahead = [_like(batch) for _ in range(_batches_ahead(trainer))]
        self._loss = self._norm = None  # The loop keeps them until the next.
        prepared = trainer.optimizer
        self.optimizer = getattr(prepared, "optimizer", prepared)

    def __call__(self) -> None:
        """Run it."""
        trainer = self._trainer()
        assert trainer is not None
        accelerator = trainer.accelerator
        for batch in self._run:
            last = batch is self._run[-1]
            accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else accelerator.no_sync(model=self.model):
                self._loss = trainer.training_step(self.model, copy.copy(batch), self._items)
        self._norm = accelerator.clip_grad_norm_(self.model.parameters(), trainer.args.max_grad_norm or float("inf"))
        trainer.optimizer.step()
        self.model.zero_grad()


def _batches_ahead(trainer: Any) -> int:
    """The number of further batches in accelerate's loader, in host memory: they count where that is the device."""
    if trainer.args.device.type != "cpu":
        return 0
    return 2 if isinstance(trainer.callback_handler.train_dataloader, DataLoaderDispatcher) else 1


def _like(batch: Any) -> Any:
    return map_tensors(torch.empty_like, batch)
