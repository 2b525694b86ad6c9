"""A memory budget for the Trainer of transformers, and for trainers made from it: one callback, and its own step."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Unpack

import torch

from planner.integrations.budgeted_training import BudgetedTraining, BudgetSettings, require
from planner.plans.refusals import Infeasible
from profiler.measurement.device_memory import ran_out
from profiler.workload.steps import ProfileError, causes_of
from profiler.workload.tensor_trees import map_tensors
from profiler.workload.workload import Workload

require("transformers accelerate", "transformers", "accelerate")

from accelerate.data_loader import DataLoaderDispatcher  # noqa: E402
from transformers import Trainer, TrainerCallback  # noqa: E402


class MemoryBudgetCallback(TrainerCallback):
    """Keeps a ``Trainer``'s training steps within a memory budget: ``trainer.add_callback(MemoryBudgetCallback(...))``.

    At the first step the trainer's own ``training_step`` is profiled on the batches that it has, with clipping and the
    optimizer's step; the plan is solved for, applied, and written to the trainer's log. Losses are those of the run
    without the callback: random states, data order and whatever the step touches are put back. Where batches change
    their shapes there are plans per signature. With ``auto_find_batch_size`` a budget that no plan meets is a shortage
    of memory, and the batch gets smaller. The plan goes when training ends; evaluation is not planned.

    Args:
        trainer: that the callback is added to; also one of TRL.
        budget: the most bytes on the device at once during a whole training step: ``"8GiB"``, ``"70%"`` of the
            unplanned peak, or bytes.
        settings: ``solver``, ``offload``, ``headroom`` and ``numerics`` as for ``planner.solve``; nothing is offloaded
            once batches have changed shapes. ``limit``: bytes that no step of profiling takes more than, for a step
            that does not fit without a plan. ``verify``: check the plan against its own run, as
            ``planner.auto_checkpoint`` does. ``watch``: also take the peak of a step on a CPU; on CUDA that is free and
            done anyway.

    Raises:
        ValueError: no trainer, a budget that is no size, or checkpointing or offloading of the trainer's own is on.
        Infeasible: by ``trainer.train()`` before its first step, where no plan fits; with the smallest budget.
    """

    def __init__(
        self,
        trainer: Trainer,
        budget: str | int,
        **settings: Unpack[BudgetSettings],
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(
                f"MemoryBudgetCallback: expected a transformers.Trainer, got a {type(trainer).__name__}; make the "
                "trainer first: trainer.add_callback(MemoryBudgetCallback(trainer, budget=...))"
            )
        _check_arguments(trainer.args)
        self.training = BudgetedTraining(budget, **settings)
        self._trainer = weakref.ref(trainer)  # It holds its callbacks.
        self._taps: list[str] = []
        self._batches: tuple[Sequence[Any], Any] = (), None
        self._said_peak = False

    def remove(self) -> None:
        """Take the plan off and leave the trainer as it was: also after an interrupt, which ends no training."""
        trainer = self._trainer()
        while self._taps:
            name = self._taps.pop()
            if trainer is not None:
                vars(trainer).pop(name, None)
        self._batches = (), None
        self.training.remove()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training begins, or begins again with a smaller batch: no plan is left of before."""
        self.remove()
        _check_arguments(args)
        trainer = self._the_trainer(args)
        self._said_peak = False
        self._tap(trainer, "get_batch_samples", self._batches_come)
        self._tap(trainer, "training_step", self._batch_begins)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See that there is a plan for the batches of the step."""
        trainer = self._the_trainer(args)
        batches, items = self._batches
        optimizer: Any = trainer.optimizer
        try:
            with _attributes_kept(trainer):
                made = self.training.begin_step(
                    batches, lambda batch: _workload(trainer, batches, batch, items), optimizer
                )
        except ValueError as error:
            self.remove()
            if args.auto_find_batch_size and _is_shortage(error):
                raise torch.OutOfMemoryError(f"{error}: out of memory.") from error  # As it looks for.
            raise
        if made:
            Trainer.log(trainer, self.training.facts())
        self._say_peak(trainer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the plan off."""
        self._say_peak(self._the_trainer(args))
        self.remove()

    def _say_peak(self, trainer: Trainer) -> None:
        if not self._said_peak and self.training.measured_peak_bytes is not None:
            self._said_peak = True
            Trainer.log(trainer, {"measured_peak_bytes": self.training.measured_peak_bytes})

    def _the_trainer(self, args: Any) -> Trainer:
        trainer = self._trainer()
        if trainer is None or trainer.args is not args:
            raise ValueError(
                "MemoryBudgetCallback: expected the trainer that it was made for, got another one's training; make one "
                "for each trainer"
            )
        return trainer

    def _tap(self, trainer: Trainer, name: str, tap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        vars(trainer)[name] = tap(getattr(trainer, name))
        self._taps.append(name)

    def _batches_come(self, collect: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._batches = collect(*args, **kwargs)
            return self._batches

        return run

    def _batch_begins(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.training.begin_batch(inputs)
            return step(model, inputs, *args, **kwargs)

        return run


def _workload(trainer: Trainer, batches: Sequence[Any], batch: Any, items: Any) -> Workload:
    step = TrainerStep(trainer, batches, batch, items)
    return Workload(model=step.model, inputs=batch, step=step, optimizer=step.optimizer)


def _check_arguments(args: Any) -> None:
    for name in ("activation_checkpointing", "gradient_checkpointing", "activation_offloading"):
        if getattr(args, name, None):
            raise ValueError(
                f"MemoryBudgetCallback: expected {name}=False in {type(args).__name__}, got True; switch it off: the "
                "plan chooses what runs again and what is sent to host memory"
            )


def _is_shortage(error: ValueError) -> bool:
    return isinstance(error, Infeasible) or (isinstance(error, ProfileError) and any(map(ran_out, causes_of(error))))


@contextmanager
def _attributes_kept(trainer: Trainer) -> Iterator[None]:
    """Binds the trainer's attributes afterwards to the values that they have now."""
    kept = dict(vars(trainer))
    try:
        yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(kept)


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
            with nullcontext() if last else accelerator.no_sync(model=self.model):
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
