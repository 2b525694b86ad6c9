"""Keeps a model that a framework trains within a memory budget: a plan for its own step, and plans as batches grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed

from planner.distributed.collective import apply, profile
from planner.distributed.solving import solve
from planner.integrations.batch_signatures import BatchSignatures
from planner.plans.offload_request import Offload, OffloadMode
from planner.plans.plan import Plan
from planner.runtime.applier import Handle
from planner.training.dynamic_shapes import DynamicHandle, apply_profiled
from planner.training.verification import can_verify, verify as verified
from planner.units import check_size, parse_bytes
from profiler.records import Profile
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.compiled_forwards import is_compiled
from profiler.workload.workload import Workload

# The framework's step on such a batch, as a workload whose inputs the batch is.
StepOn = Callable[[Any], Workload]


class BudgetedTraining:
    """The plans of one model while a framework trains it.

    A framework's integration calls ``begin_step`` before each of its steps. The first profiles the step, solves and
    applies. The plan stays as long as batches are in no dimension larger than the profiled one; when a larger one
    comes, there are plans per signature from then on, as with ``auto_checkpoint(dynamic=True)``, and what they do not
    cover is profiled when it comes. On several ranks the first plan stays: ranks whose batches differ would part.

    Args:
        budget, solver, offload, headroom, verify: as for ``auto_checkpoint``.
        limit: as for ``profile``: bytes that no step of profiling takes more than.
        watch: as for ``apply``: also take the peak of a step on a CPU; on CUDA that is free and done anyway.

    Attributes:
        handle: of what is applied; None before the first step and after ``remove``.
        plan: that was made last; it stays after ``remove``.

    Raises:
        ValueError: the budget or the limit is no size.
    """

    def __init__(
        self,
        budget: str | int,
        *,
        solver: str = "auto",
        offload: Offload | OffloadMode = "auto",
        headroom: str | int = 0,
        limit: str | int | None = None,
        verify: bool = True,
        watch: bool | None = None,
    ) -> None:
        check_size(budget)  # A wrong one is said before anything is built on it.
        if limit is not None:
            parse_bytes(limit)
        self.budget = budget
        self.solver = solver
        self.offload: Offload | OffloadMode = offload
        self.headroom = headroom
        self.limit = limit
        self.verify = verify
        self.watch = watch
        self.handle: Handle[Plan] | None = None
        self.plan: Plan | None = None
        self._signatures = BatchSignatures()
        self._profile: Profile | None = None
        self._peak_bytes: int | None = None  # Of handles that are gone.

    def begin_step(self, batches: Sequence[Any], step_on: StepOn) -> bool:
        """See that a plan holds for each micro-batch of the step that begins; whether one was made just now.

        Parameters, gradients, states of optimizers, random states and what the step refers to are as before.

        Args:
            batches: that the step goes through.
            step_on: the step, with one of them as the inputs that its plan is chosen by.

        Raises:
            Infeasible: no plan fits; carries the smallest budget that would do.
            ProfileError, PlanMismatch, ValueError: as ``profile``, ``solve`` and ``apply``.
        """
        made = False
        for batch in sorted(batches, key=_elements, reverse=True):
            if self.handle is None:
                self._plan_first(batch, step_on)
                made = True
            elif not self._holds_for(batch):
                self._plan_another(batch, step_on)
                made = True
        return made

    def begin_batch(self, batch: Any) -> None:
        """This micro-batch is under way: calls of the model belong to it."""
        self._signatures.now = self._signatures.of_batch(batch)

    def facts(self) -> dict[str, float]:
        """What the plan that was made last claims, by names with units; empty where there is none."""
        plan = self.plan
        if plan is None:
            return {}
        return {
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "unplanned_peak_bytes": plan.unplanned_peak_bytes,
            "predicted_slowdown": plan.predicted_seconds / plan.unplanned_seconds,
        }

    @property
    def measured_peak_bytes(self) -> int | None:
        """Most bytes at once in a step of the training itself; None as long as, or where, it is not known."""
        now = None if self.handle is None else self.handle.measured_peak_bytes
        return max((peak for peak in (now, self._peak_bytes) if peak is not None), default=None)

    def remove(self) -> None:
        """Take the plans off; calling it again does nothing. What was planned and measured can still be read."""
        if self.handle is not None:
            self._peak_bytes = self.measured_peak_bytes
            self.handle.remove()
        self.handle = self._profile = None

    def _plan_first(self, batch: Any, step_on: StepOn) -> None:
        workload = step_on(batch)
        self._profile = profile(workload, limit=self.limit)
        plan = solve(self._profile, self.budget, solver=self.solver, offload=self.offload, headroom=self.headroom)
        if self.verify and can_verify(workload, plan):
            plan = verified(workload, plan, solver=self.solver).plan
        self._first, self.plan, self._peak_bytes = self._signatures.of_batch(batch), plan, None
        self.handle = apply(workload.model, plan, watch=self.watch)

    def _holds_for(self, batch: Any) -> bool:
        if isinstance(self.handle, DynamicHandle):
            return self.handle.holds_for(batch)
        return self._first.covers(self._signatures.of_batch(batch)) or not self._may_change()

    def _may_change(self) -> bool:
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        model = None if self.handle is None else self.handle.model
        return model is not None and not is_compiled(model) and (alone or torch.distributed.get_world_size() == 1)

    def _plan_another(self, batch: Any, step_on: StepOn) -> None:
        if not isinstance(self.handle, DynamicHandle):
            assert self.handle is not None and self._profile is not None
            model, budget_bytes = self.handle.model, self.handle.plan.budget_bytes
            assert model is not None
            self._peak_bytes = self.measured_peak_bytes
            self.handle.remove()
            self.handle = apply_profiled(
                model,
                {self._first: self._profile},
                reader=self._signatures,
                budget_bytes=budget_bytes,
                solver=self.solver,
                headroom=self.headroom,
            )
        self.plan = self.handle.profile_now(step_on(batch))


def _elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))
