"""A memory budget for the Trainer of Lightning: one callback."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import nn

from planner.integrations.budgeted_training import BudgetedTraining, BudgetSettings, require
from planner.units import format_bytes
from profiler.workload.snapshot import preserved
from profiler.workload.workload import Workload

require("lightning", "lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402
from lightning.pytorch.profilers import PassThroughProfiler  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402

_PARTS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")  # of a module, by attribute
_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)


class MemoryBudgetCallback(Callback):
    """Keeps training steps within a memory budget: ``Trainer(callbacks=[MemoryBudgetCallback(budget="8GiB")])``.

    As the first batch starts, the loop's own step is profiled on it: ``training_step``, backward, clipping, the
    optimizer's step. The plan is solved for, applied, and written to Lightning's log and the trainer's loggers. Losses
    are those of the run without the callback: random states, counters and whatever the step touches are put back, and
    loggers see nothing of it. Where a larger batch comes, its step is profiled in turn, and there are plans per
    signature from then on. The plan goes when training ends, also by an exception; validation is not planned.

    With automatic optimization all that ``training_step`` runs is planned; with manual optimization, the network that
    it trains.

    Args:
        budget: the most bytes on the device at once during a whole training step: ``"8GiB"``, ``"70%"`` of the
            unplanned peak, or bytes.
        network: name of the module to plan (``"generator"``), where manual optimization trains several; the others
            keep everything, within the budget.
        settings: ``solver``, ``offload``, ``headroom`` and ``numerics`` as for ``planner.solve``; nothing is offloaded
            once batches have changed shapes. ``limit``: bytes that no step of profiling takes more than, for a step
            that does not fit without a plan. ``verify``: check the plan against its own run, as
            ``planner.auto_checkpoint`` does. ``watch``: also take the peak of a step on a CPU; on CUDA that is free and
            done anyway.

    Raises:
        ValueError: a budget that is no size.

    ``fit`` raises ``planner.Infeasible`` before its first step where no plan fits, with the smallest budget that would
    do; and ValueError where the module is compiled, takes an iterator, or is trained by a strategy that no plan holds
    in.
    """

    def __init__(
        self,
        budget: str | int,
        *,
        network: str | None = None,
        **settings: Unpack[BudgetSettings],
    ) -> None:
        self.training = BudgetedTraining(budget, **settings)
        self._network = network
        self._planned: nn.Module | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """See that there is a plan for the batch."""
        if self._planned is None:
            _check(trainer, pl_module)
            self._planned = self._part_to_plan(trainer, pl_module, _LightningStep(trainer, batch, batch_idx))
        planned = self._planned

        def workload(inputs: Any) -> Workload:
            step = _LightningStep(trainer, inputs, batch_idx)
            return Workload(model=planned, inputs=_as_inputs(inputs), step=step, optimizer=trainer.optimizers)

        self.training.begin_batch(batch)
        if self.training.begin_step([batch], workload, trainer.optimizers):
            self._say(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the plan off, and write what was measured to the trainer's loggers."""
        if self._planned is not None and self.training.measured_peak_bytes is not None:
            for logger in trainer.loggers:
                metrics = {"measured_peak_bytes": float(self.training.measured_peak_bytes)}
                logger.log_metrics(metrics, step=trainer.global_step)
        self.remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the plan off."""
        self.remove()

    def remove(self) -> None:
        """Take the plan off and leave the module as it was; calling it again does nothing."""
        self.training.remove()
        if isinstance(self._planned, TrainingStepModule):
            self._planned.remove()
        self._planned = None

    def _part_to_plan(self, trainer: Trainer, owner: LightningModule, step: _LightningStep) -> nn.Module:
        if self._network is not None:
            return _named(owner, self._network)
        if owner.automatic_optimization:
            module = TrainingStepModule(owner)
            module.install()
            return module
        redirected = trainer.strategy.model is not owner
        return _trained_network(owner, step, trainer.optimizers, redirected=redirected)

    def _say(self, trainer: Trainer) -> None:
        facts = self.training.facts()
        rank_zero_info(
            f"MemoryBudgetCallback: a training step is to take {format_bytes(int(facts['predicted_peak_bytes']))} of "
            f"{format_bytes(int(facts['budget_bytes']))}, {format_bytes(int(facts['unplanned_peak_bytes']))} without a "
            f"plan, and {facts['predicted_slowdown']:.2f} times as long"
        )
        for logger in trainer.loggers:
            logger.log_metrics(facts, step=trainer.global_step)


def _named(owner: nn.Module, name: str) -> nn.Module:
    try:
        return owner.get_submodule(name)
    except AttributeError as error:
        names = ", ".join(repr(child) for child, _ in owner.named_children())
        raise ValueError(
            f"MemoryBudgetCallback: network={name!r} is no module of the {type(owner).__name__}; give one of {names}"
        ) from error


def _as_inputs(batch: Any) -> Any:
    """The batch as inputs of a workload: Lightning's may be of any kind."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else batch if isinstance(batch, dict) else (batch,)


def _check(trainer: Trainer, owner: LightningModule) -> None:
    """Refuse what no plan holds in; raises ValueError."""
    strategy = trainer.strategy
    if not isinstance(strategy, _STRATEGIES):
        raise ValueError(
            f"MemoryBudgetCallback: {type(strategy).__name__} is not supported, only a single device, DDPStrategy and "
            f"ModelParallelStrategy; use ModelParallelStrategy with fully_shard to split parameters"
        )
    if getattr(owner, "_compiler_ctx", None) is not None:
        raise ValueError(
            f"MemoryBudgetCallback: the {type(owner).__name__} is compiled as a whole and cannot be planned; "
            "compile the network in it instead: self.net.compile()"
        )
    if is_param_in_hook_signature(owner.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "MemoryBudgetCallback: training_step takes dataloader_iter, whose batches cannot be put back after "
            "profiling; let it take the batch"
        )


class _LightningStep:
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
    """Discards a step's writes to loggers and to Lightning's profiler, as its search for a batch size does."""
    loggers, profiler = trainer.loggers, trainer.profiler
    trainer.loggers = [DummyLogger() for _ in loggers]
    trainer.profiler = PassThroughProfiler()
    try:
        yield
    finally:
        trainer.loggers, trainer.profiler = loggers, profiler


class TrainingStepModule(nn.Module):
    """Has the parameters and modules of another one under the same names, and its ``training_step`` as forward.

    A ``training_step`` calls one network or several and computes the loss: all of it is what a plan is made for. The
    owner's own ``forward`` may not be called at all, and under DDP it is redirected at every step.

    Args:
        owner: whose training step it is. Once this is installed, ``owner.training_step`` calls it.
    """

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: vars(owner)[name] for name in _PARTS})
        self._around = (owner,)  # In a tuple it is no part of this.
        self._plain: Any = owner.training_step
        self._installed: Any = None

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As of the owner, which is what is switched between training and evaluation."""
        around = vars(self).get("_around")
        return around[0].training if around else True

    @training.setter
    def training(self, mode: bool) -> None:
        """Set by ``nn.Module`` for each module; the owner's own says it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The owner's training step."""
        return self._plain(*args, **kwargs)

    def install(self) -> None:
        """Calls of ``owner.training_step`` come here from now on; those of copies of the owner do not."""
        (owner,), plain = self._around, self._plain

        def training_step(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is not owner:
                return type(module).training_step(module, *args, **kwargs)
            return self(*args, **kwargs)

        training_step.__wrapped__ = getattr(plain, "__func__", plain)  # pyright: ignore[reportFunctionMemberAccess]
        self._installed = vars(owner)["training_step"] = types.MethodType(training_step, owner)

    def remove(self) -> None:
        """Put the owner's own training step back; calling it again does nothing."""
        (owner,) = self._around
        if self._installed is not None and vars(owner).get("training_step") is self._installed:
            del vars(owner)["training_step"]
        self._installed = None


def _trained_network(owner: nn.Module, step: Callable[[], Any], optimizers: Any, *, redirected: bool) -> nn.Module:
    """The one network that a step calls: the owner itself, where it calls its forward, or a module in it.

    Runs the step once; whatever it changes is put back.

    Args:
        owner: the LightningModule.
        step: its training step, with backward and the optimizers' steps.
        optimizers: that it uses.
        redirected: whether the step itself runs within a call of the owner, as under DDP.

    Raises:
        ValueError: the step calls none, or several; names them.
    """
    calls = _Calls(owner, 1 if redirected else 0)
    workload = Workload(model=owner, step=step, optimizer=optimizers)
    with preserved(workload):
        hooks = [hook for name, module in owner.named_modules() for hook in calls.watch(name, module)]
        try:
            step()
        finally:
            for hook in hooks:
                hook.remove()
    if calls.names and not calls.outside:
        return owner
    if len(calls.names) == 1:
        return owner.get_submodule(next(iter(calls.names)))
    got = " and ".join(map(repr, calls.names)) or "none"
    raise ValueError(
        f"MemoryBudgetCallback: manual optimization in this {type(owner).__name__} trains {got}, and a plan is for one "
        f"network; name the one to plan, which runs once for each backward: "
        f"MemoryBudgetCallback(..., network={next(iter(calls.names), 'NAME')!r})"
    )


class _Calls:
    """The outermost calls of modules in which gradients flow."""

    def __init__(self, owner: nn.Module, around: int) -> None:
        self._owner = owner
        self._around = around  # calls of the owner that are none of its forward
        self._owner_depth = self._depth = 0
        self.names: dict[str, None] = {}
        self.outside = False

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        def begins(*_: Any) -> None:
            if module is self._owner:
                self._owner_depth += 1
                return
            trains = any(parameter.requires_grad for parameter in module.parameters())
            if not self._depth and torch.is_grad_enabled() and module.training and trains:
                self.names[name] = None
                self.outside |= self._owner_depth <= self._around
            self._depth += 1

        def ends(*_: Any) -> None:
            if module is self._owner:
                self._owner_depth -= 1
            else:
                self._depth -= 1

        return [module.register_forward_pre_hook(begins), module.register_forward_hook(ends, always_call=True)]
