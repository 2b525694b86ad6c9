"""A memory budget for the Trainer of Lightning: one callback."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.integrations.budgeted_training import BudgetedTraining
from planner.integrations.optional_packages import require
from planner.plans.offload_request import Offload, OffloadMode
from planner.plans.solving import Numerics
from planner.units import format_bytes
from profiler.workload.workload import Workload

require("lightning", "lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # noqa: E402
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature  # noqa: E402

from planner.integrations.lightning_networks import trained_network  # noqa: E402
from planner.integrations.lightning_step import LightningStep  # noqa: E402
from planner.integrations.training_step_module import TrainingStepModule  # noqa: E402

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
        solver, offload, headroom, numerics: as for ``planner.solve``; nothing is offloaded once batches have changed
            shapes.
        limit: bytes that no step of profiling takes more than, for a step that does not fit without a plan.
        verify: hold the plan against its own run, as ``planner.auto_checkpoint`` does.
        watch: also take the peak of a step on a CPU; on CUDA that is free and done anyway.

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
        solver: str = "auto",
        offload: Offload | OffloadMode = "auto",
        headroom: str | int = 0,
        limit: str | int | None = None,
        verify: bool = True,
        watch: bool | None = None,
        numerics: Numerics = "eager",
    ) -> None:
        self.training = BudgetedTraining(
            budget,
            solver=solver,
            offload=offload,
            headroom=headroom,
            limit=limit,
            verify=verify,
            watch=watch,
            numerics=numerics,
        )
        self._network = network
        self._planned: nn.Module | None = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """See that there is a plan for the batch."""
        if self._planned is None:
            _check(trainer, pl_module)
            self._planned = self._part_to_plan(trainer, pl_module, LightningStep(trainer, batch, batch_idx))
        planned = self._planned

        def workload(inputs: Any) -> Workload:
            step = LightningStep(trainer, inputs, batch_idx)
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

    def _part_to_plan(self, trainer: Trainer, owner: LightningModule, step: LightningStep) -> nn.Module:
        if self._network is not None:
            return _named(owner, self._network)
        if owner.automatic_optimization:
            module = TrainingStepModule(owner)
            module.install()
            return module
        redirected = trainer.strategy.model is not owner
        return trained_network(owner, step, trainer.optimizers, redirected=redirected)

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
            f"MemoryBudgetCallback: expected network to be a module of the {type(owner).__name__}, got {name!r}; it "
            f"has {names}"
        ) from error


def _as_inputs(batch: Any) -> Any:
    """What a workload takes as a batch: Lightning's may be of any kind."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else batch if isinstance(batch, dict) else (batch,)


def _check(trainer: Trainer, owner: LightningModule) -> None:
    """Refuse what no plan holds in; raises ValueError."""
    strategy = trainer.strategy
    if not isinstance(strategy, _STRATEGIES):
        raise ValueError(
            f"MemoryBudgetCallback: expected a single device, DDPStrategy or ModelParallelStrategy, got "
            f"{type(strategy).__name__}; use ModelParallelStrategy with fully_shard to split parameters"
        )
    if getattr(owner, "_compiler_ctx", None) is not None:
        raise ValueError(
            f"MemoryBudgetCallback: expected a {type(owner).__name__} that is not compiled, got torch.compile of it; "
            "compile the network in it instead: self.net.compile()"
        )
    if is_param_in_hook_signature(owner.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "MemoryBudgetCallback: expected training_step to take a batch, got one that takes dataloader_iter, whose "
            "batches nobody can put back; let it take the batch"
        )
