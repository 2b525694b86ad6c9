"""One update of a transformers Trainer, as its loop runs it, as a function that can be run any number of times."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from profiler.workload.tensor_trees import map_tensors, tensors_in

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
        # What its step may change: found here by what goes through a function's referents.
        self._state = [value for name, value in vars(trainer).items() if name not in _NO_STATE]
        self._batches, self._items = list(batches), items
        self._run = [*[other for other in batches if other is not batch][:1], batch]
        self._ahead = _like(batch)
        prepared = trainer.optimizer
        self.optimizer = getattr(prepared, "optimizer", prepared)

    def __call__(self) -> Any:
        """The loss and the gradients' norm, which the loop keeps until the next."""
        trainer = self._trainer()
        assert trainer is not None
        accelerator = trainer.accelerator
        for batch in self._run:
            last = batch is self._run[-1]
            accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else accelerator.no_sync(model=self.model):
                loss = trainer.training_step(self.model, dict(batch), self._items)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), trainer.args.max_grad_norm or float("inf"))
        trainer.optimizer.step()
        self.model.zero_grad()
        return loss, norm


def _like(batch: Any) -> Any:
    """Room for the batch that accelerate's loader has ahead, where it lies on the device, which is the host itself."""
    if all(tensor.device.type == "cpu" for tensor in tensors_in(batch)):
        return map_tensors(torch.empty_like, batch)
    return None
