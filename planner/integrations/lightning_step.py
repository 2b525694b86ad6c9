"""One update of a Lightning Trainer, as its fit loop runs it, as a function that can be run any number of times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler


class LightningStep:
    """Runs the loop's own optimization on a batch: ``training_step``, backward, clipping, the optimizers' steps.

    Where gradients are accumulated two micro-batches are enough: the first one clears gradients, the last one steps,
    and those between do less.

    Args:
        trainer: in training, as a batch starts.
        batch: on the device.
        index: of the batch.
    """

    def __init__(self, trainer: Any, batch: Any, index: int) -> None:
        self._trainer = trainer
        self._loop = trainer.fit_loop.epoch_loop  # What it counts is found near, and put back.
        self._batch = batch
        every = trainer.accumulate_grad_batches
        ready = self._loop.batch_progress.current.ready
        # Of each micro-batch its index, and how many there are by then: the loop reads off them what it is to do.
        alone = every == 1 or trainer.num_training_batches == 1
        self._micro_batches = [(index, ready)] if alone else [(0, 1), (1, every)]

    def __call__(self) -> Any:
        """The loss, without its graph; None where the step returns none."""
        output = None
        with _unseen(self._trainer):
            for index, ready in self._micro_batches:
                self._loop.batch_progress.current.ready = ready
                output = self._optimize(self._loop._build_kwargs(OrderedDict(), self._batch, index), index)
        return output.get("loss") if output else None

    def _optimize(self, arguments: OrderedDict[str, Any], index: int) -> Any:
        if self._trainer.lightning_module.automatic_optimization:
            return self._loop.automatic_optimization.run(self._trainer.optimizers[0], index, arguments)
        return self._loop.manual_optimization.run(arguments)


@contextmanager
def _unseen(trainer: Any) -> Iterator[None]:
    """What a step writes to loggers and to Lightning's profiler goes nowhere, as while it looks for a batch size."""
    loggers, profiler = trainer.loggers, trainer.profiler
    trainer.loggers = [DummyLogger() for _ in loggers]
    trainer.profiler = PassThroughProfiler()
    try:
        yield
    finally:
        trainer.loggers, trainer.profiler = loggers, profiler
