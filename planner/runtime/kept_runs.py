"""Runs of a stage that keep what it saves, and hand what is to be sent to the transfers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from planner.plans.lowering import LoweredSchedule
from planner.plans.plan import Plan, PlannedStage
from planner.runtime.plan_checks import is_larger, warn_once
from planner.runtime.shared_outputs import SharedOutputs
from planner.runtime.stage_input import BatchCopies
from planner.runtime.transfers import OffloadableTensor, SavedTensorLog, TransferExecutor
from profiler.recomputation.module_rerun import NOT_NEEDED, CallState, Saw, rerun_keeping
from profiler.recomputation.saved_tensors import SavedTensor, unpack
from profiler.tensors.tensor_parts import sizes_of
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class CheckTurns:
    """Decides in which forwards a dropped stage compares what its second run saves with what its first run saved.

    Every stage is checked in the first forwards, and again after the circumstances change. After that, each forward
    checks one stage, in turn: reading values of every saved tensor takes a tenth of a step of tiny ops. A fault that
    persists is found within as many forwards as there are dropped stages. The number of saved tensors is always
    compared.

    Args:
        dropped: positions of the stages that take turns; others are always checked.
    """

    ALL_FORWARDS = 5

    __slots__ = ("_circumstances", "_dropped", "_forwards", "_left")

    def __init__(self, dropped: Iterable[int] = ()) -> None:
        self._dropped = sorted(dropped)
        self._left = self._forwards = 0
        self._circumstances: Hashable = None

    def forward_begins(self, circumstances: Hashable) -> None:
        """Another forward.

        Args:
            circumstances: what the stages may depend on and is known: shapes of the batch, the mode.
        """
        self._forwards += 1
        self._left = max(0, self._left - 1)
        if circumstances != self._circumstances:
            self._circumstances, self._left = circumstances, self.ALL_FORWARDS

    def checked(self, position: int) -> bool:
        """Whether a stage is checked in the forward under way."""
        if self._left or position not in self._dropped:
            return True
        return self._dropped[self._forwards % len(self._dropped)] == position


@dataclass(slots=True)
class Deviations:
    """What the stages of an applied plan were seen to do otherwise than was profiled, from step to step.

    Attributes:
        undefined: by stage, numbers of saved tensors some of whose values are undefined memory.
        dropped_stages: those that ran a first time since, each of which may be what sets its parameters.
        other_batch: the forward under way has a batch of other shapes, which has been said.
        other_inputs: a stage's input was said to have other shapes.
        turns: which dropped stages are checked in the forward under way.
    """

    undefined: dict[int, set[int]] = field(default_factory=dict)
    dropped_stages: set[int] = field(default_factory=set)
    other_batch: bool = False
    other_inputs: bool = False
    turns: CheckTurns = field(default_factory=CheckTurns)


class KeptRuns:
    """Runs the stages of one planned step where something is kept of them.

    Args:
        plan, lowered: of the step.
        deviations: what was seen of the model's stages since the plan was applied; more may be added.
        batch: what the model was given.
        transfers: of the step; None where nothing is sent.

    Attributes:
        shared: stages of whose output others than the next stage hold something.
    """

    def __init__(
        self,
        plan: Plan,
        lowered: LoweredSchedule,
        deviations: Deviations,
        batch: BatchCopies,
        transfers: TransferExecutor | None,
    ) -> None:
        self.plan = plan
        self.lowered = lowered
        self.transfers = transfers
        self.deviations = deviations
        self.batch = batch
        self.shared = frozenset(tensor.born for tensor in plan.chain.shared) if plan.chain is not None else frozenset()
        self._backward_reached = len(plan.stages)

    @property
    def backward_begun(self) -> bool:
        """Whether backward has reached a dropped stage."""
        return self._backward_reached < len(self.plan.stages)

    def backward_reaches(self, position: int) -> Iterator[int]:
        """Stages whose turn in backward has come with that of ``position``, in order; it is the last of them."""
        passed = range(self._backward_reached - 1, position, -1)
        self._backward_reached = min(self._backward_reached, position)
        yield from (*passed, position)

    def first_run(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a stage with autograd, which keeps what the stage saves."""
        if not self._sends(position):
            return forward(*args, **kwargs)
        assert self.transfers is not None
        self.check_shapes(self.plan.stages[position], tensors_in((args, kwargs)))
        log = SavedTensorLog()
        with torch.autograd.graph.saved_tensors_hooks(log.pack, unpack):
            output = forward(*args, **kwargs)
        log.parameters.pass_on()
        self.transfers.kept(position, 0, log.saved())
        return output

    def rerun(
        self,
        position: int,
        forward: Callable[..., Any],
        state: CallState,
        args: Any,
        kwargs: Any,
        saw: Saw,
        returned: SharedOutputs | None,
    ) -> tuple[list[Any], Any]:
        """Run a stage again to its end: what it saves in order, and its output cut off from the graph.

        Args:
            position: of the stage.
            forward, state, args, kwargs: what to run.
            saw: is told of each tensor that is saved.
            returned: what the stage returned before, where others hold that.
        """
        saved, output = rerun_keeping(forward, state, args, kwargs, saw)
        kept: list[Any] = saved
        if sends := self._sends(position):
            kept = [tensor if tensor is NOT_NEEDED else OffloadableTensor(tensor) for tensor in saved]
        if returned is not None:
            outputs = tensors_in(output)
            returned.take_the_place_of(outputs, [*outputs, *_held_by(kept)])
        if sends:
            assert self.transfers is not None
            sent = [tensor if isinstance(tensor, OffloadableTensor) else None for tensor in kept]
            self.transfers.kept(position, 0, sent)
        return kept, output

    def check_shapes(self, stage: PlannedStage, inputs: Sequence[Tensor]) -> None:
        """Warn once where the input of a stage has other shapes than when profiled, and the batch does not say so."""
        if self.deviations.other_batch or self.deviations.other_inputs or not stage.input_shapes:
            return
        shapes = [*map(sizes_of, inputs)]
        if shapes != list(stage.input_shapes):
            self.deviations.other_inputs = True
            larger = is_larger(shapes, stage.input_shapes)
            then = "the peak is not promised" if larger else "they are smaller and need less memory"
            warn_once(stage.name, f"its input has other shapes than when profiled, {shapes}; {then}")

    def _sends(self, position: int) -> bool:
        """Whether anything is sent of what a stage keeps."""
        return self.transfers is not None and self.transfers.sends(position, 0)


def _held_by(saved: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among what was saved, and those of the stand-ins among it."""
    for each in saved:
        tensor = each.held if isinstance(each, SavedTensor) else each
        if isinstance(tensor, Tensor):
            yield tensor
