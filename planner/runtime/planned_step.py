"""One forward of a planned model: runs each stage as the plan says, and prepares the backward that follows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from planner.plans.lowering import LoweredSchedule
from planner.plans.plan import Plan
from planner.runtime.copy_engines import CopyEngine
from planner.runtime.dropped_stage import DroppedProgram, DroppedStage, StepContext
from planner.runtime.plan_checks import Deviations, PlanWarnings, warn_of_a_larger_step
from planner.runtime.schedule_runner import ScheduleRunner
from planner.runtime.stage_programs import StagePrograms
from planner.runtime.transfers import SavedTensorLog, TransferExecutor, before_backward
from profiler.recomputation.held_inputs import BatchCopies, CallOutput
from profiler.recomputation.saved_tensors import unpack
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.custom_step import next_node
from profiler.workload.tensor_trees import tensors_in

leave_uncompiled(__name__)

_Latest = tuple[DroppedStage, CallOutput]


class PlannedStep:
    """The stages of one forward, and what its backward will need.

    Args:
        plan, lowered, deviations, batch: as for ``StepContext``.
        programs: those of the plan's captured stages.
        warn: gives the warnings of the plan.
        engine: copies to and from host memory; None where nothing is sent.
    """

    def __init__(
        self,
        plan: Plan,
        lowered: LoweredSchedule,
        deviations: Deviations,
        batch: BatchCopies,
        programs: StagePrograms,
        warn: PlanWarnings,
        engine: CopyEngine | None = None,
    ) -> None:
        self._plan = plan
        self._programs = programs
        # Only the graph holds dropped stages, but for the latest one while the forward is under way.
        self._dropped: weakref.WeakValueDictionary[int, DroppedStage] = weakref.WeakValueDictionary()
        self._latest: _Latest | None = None
        self._ran: set[int] = set()
        self._transfers = None if engine is None else TransferExecutor(plan, lowered, engine, self._dropped, warn)
        self._schedule = ScheduleRunner(lowered, len(plan.stages), self._dropped, self._transfers)
        before = self._schedule.before_backward
        self._context = StepContext(plan, lowered, deviations, batch, self._transfers, warn, before)
        self._node_after_stage = self._first_node = next_node()
        self._own_nodes = 0  # those that no forward makes without a plan

    def run(self, position: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run stage ``position`` for the first time, keeping on the device nothing but what the plan says."""
        transfers = self._transfers
        if transfers is not None:
            transfers.next_begins(position - 1)
            if position and self._plan.stages[position - 1].kind == "outside":
                self._expect_backward(position - 1, tensors_in((args, kwargs)), self._node_after_stage)
        first_node = next_node()
        output = self._run(position, module, forward, args, kwargs)
        self._ran.add(position)
        if transfers is not None:
            transfers.forward_done(position)
            self._node_after_stage = next_node()
        if transfers is not None or position in self._dropped:
            self._expect_backward(position, tensors_in(output), first_node)
        return output

    def run_unseen(
        self, like: int, name: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a call that comes on top of the stages of the plan, as far as may be holding nothing but its input.

        Args:
            like: position of a stage of its kind.
            name: name of the module.
            module, forward, args, kwargs: as for ``run``.
        """
        kin = self._plan.stages[like]
        how = "is recomputed as a whole" if kin.record.recomputable else "is kept"
        self._context.warn.of_stage(
            name, f"it runs in a step though it did not when profiled; it {how}, and the peak is not promised"
        )
        if not kin.record.recomputable:
            return forward(*args, **kwargs)
        position, first_node = len(self._plan.stages) + len(self._ran), next_node()
        like_kin = replace(kin, record=replace(kin.record, name=name, links=()))
        stage = DroppedStage(position, module, forward, self._context, like_kin)
        output = self._run_dropped(stage, None, args, kwargs, expects_links=True)
        self._ran.add(position)
        self._latest = None
        self._expect_backward(position, tensors_in(output), first_node)
        return output

    @property
    def backward_begun(self) -> bool:
        """Whether a stage of it has run again, or was about to."""
        return self._schedule.backward_begun

    def leave(self, output: Any) -> None:
        """The model's forward is over, and has returned this."""
        made = next_node() - self._first_node - self._own_nodes
        if self._plan.forward_nodes and made > self._plan.forward_nodes:
            warn_of_a_larger_step(self._context.warn, made - self._plan.forward_nodes)
        if self._transfers is not None:
            last = len(self._plan.stages) - 1
            self._transfers.forward_done(last)  # The loss comes yet.
            self._expect_backward(last, tensors_in(output), self._node_after_stage)

    def finish(self) -> None:
        """The forward is over, or has failed."""
        self._latest = None

    def _run(self, position: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = next_node()
        program = self._programs.program(position, module, forward, args, kwargs)
        self._own_nodes += next_node() - before  # of tracing
        self._own_nodes += len(program.program.of_parameters_last_first) if program and program.in_order else 0
        step = self._context
        if position not in step.lowered.dropped:
            if program is not None:
                checked = step.deviations.turns.checked(position)
                return program.called(args, kwargs, step.batch, checked=checked)
            if not self._programs.runs(position):
                return self._run_kept(position, forward, args, kwargs)
        if program is None:
            stage = DroppedStage(position, module, forward, step)
        else:
            stage = DroppedProgram(program, position, module, forward, step)
        # A step may leave the stage before out.
        expects_links = self._latest is not None and position - 1 in self._ran
        output = self._run_dropped(stage, self._latest, args, kwargs, expects_links=expects_links)
        self._latest = stage, CallOutput(tensors_in(output))
        return output

    def _run_kept(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a stage with autograd, which keeps what it saves, and hand what is to be sent to the transfers."""
        if self._transfers is None or not self._context.sends(position):
            return forward(*args, **kwargs)
        self._context.check_shapes(self._plan.stages[position], tensors_in((args, kwargs)))
        log = SavedTensorLog()
        with torch.autograd.graph.saved_tensors_hooks(log.pack, unpack):
            output = forward(*args, **kwargs)
        log.parameters.pass_on()
        self._transfers.kept(position, 0, log.saved())
        return output

    def _run_dropped(
        self, stage: DroppedStage, latest: _Latest | None, args: Any, kwargs: Any, *, expects_links: bool
    ) -> Any:
        """The first run of a dropped stage, whose input may be what the ``latest`` one returned."""
        previous, returned = latest or (None, None)
        before = next_node()
        stage.take_input((args, kwargs), previous, returned, expects_links=expects_links)
        self._own_nodes += next_node() - before
        output = stage.run_first(args, kwargs)
        self._dropped[stage.position] = stage
        return output

    def _expect_backward(self, position: int, outputs: Sequence[Tensor], first_node: int) -> None:
        before_backward(outputs, first_node, functools.partial(self._backward_begins, position))

    def _backward_begins(self, position: int) -> None:
        """The gradient of a stage's output has come: it runs again now, beside no other gradient of its own."""
        stage = self._dropped.get(position)
        if stage is not None and stage.needed:
            stage.recompute()
        elif self._transfers is not None and (stage is None or stage.done):
            self._transfers.backward_begins(position)
            self._transfers.finish_fetches(position)
