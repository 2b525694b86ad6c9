"""Keeps a model that a framework trains within a memory budget: a plan for its own step, others as the step changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, TypedDict

import torch.distributed
from torch import nn

from planner.plans.offload_request import Offload, OffloadMode
from planner.plans.plan import Plan
from planner.plans.profiling import profile
from planner.plans.refusals import Infeasible
from planner.plans.solving import Numerics, check_numerics, solve
from planner.runtime.applier import Handle, apply
from planner.training.dynamic_shapes import DynamicHandle, apply_profiled
from planner.training.signatures import Signature, signature_of
from planner.training.verification import can_verify, verify as verified
from planner.units import check_size, format_bytes, parse_bytes
from profiler.messages import warn_caller
from profiler.records import Profile
from profiler.workload.compiled_forwards import is_compiled
from profiler.workload.given_models import inner_model
from profiler.workload.optimizers import Optimizers, given_optimizers, stepped_parameters
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload

_PLACE = "MemoryBudgetCallback"  # that a person has added
_STATES = 8  # of a model, whose plans are kept; a profile with its plan takes some hundred kilobytes
# The framework's step on such a batch, as a workload whose inputs the batch is.
StepOn = Callable[[Any], Workload]


class BudgetSettings(TypedDict, total=False):
    """The settings of ``BudgetedTraining`` beside the budget, which callbacks pass on to it."""

    solver: str
    offload: Offload | OffloadMode
    headroom: str | int
    limit: str | int | None
    verify: bool
    watch: bool | None
    numerics: Numerics


class _Planned(NamedTuple):
    """One state of the model: the batch that was profiled, its profile, and the plan."""

    signature: Signature
    profile: Profile
    plan: Plan


class BudgetedTraining:
    """The plans of one model while a framework trains it.

    A framework's integration calls ``begin_step`` before each of its steps. The first profiles the step, solves and
    applies. The plan stays as long as batches are in no dimension larger than the profiled one; when a larger one
    comes, there are plans per signature from then on, as with ``auto_checkpoint(dynamic=True)``, and what they do not
    cover is profiled when it comes. Where the model itself has changed since (a part is frozen or trained, a module
    replaced, weights tied, another type, dropout on or off, other parameters in the optimizer) the step is profiled and
    solved for again, within the same bytes; a state that comes back gets its plan back. On several ranks, and where the
    model is compiled, the first plan stays: ranks that differ would diverge.

    Args:
        budget, solver, offload, headroom, verify, numerics: as for ``auto_checkpoint``.
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
        numerics: Numerics = "eager",
    ) -> None:
        check_numerics(numerics)
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
        self.numerics: Numerics = numerics
        self.handle: Handle | None = None
        self.plan: Plan | None = None
        self._signatures = _BatchSignatures()
        self._now: _Planned | None = None
        self._state: Hashable = None
        self._known: dict[Hashable, _Planned] = {}
        self._budget_bytes: int | None = None  # of the first plan
        self._peak_bytes: int | None = None  # Of handles that are gone.

    def begin_step(self, batches: Sequence[Any], step_on: StepOn, optimizers: Optimizers = None) -> bool:
        """See that a plan holds for each micro-batch of the step that begins; whether one was made just now.

        Parameters, gradients, states of optimizers, random states and what the step refers to are as before.

        Args:
            batches: that the step goes through.
            step_on: the step, with one of them as the inputs that its plan is chosen by.
            optimizers: of the step: which parameters they have is looked at.

        Raises:
            Infeasible: no plan fits the first step; carries the smallest budget that would do. Where the model has
                changed since, the plan that needs least memory is taken, with a warning.
            ProfileError, PlanMismatch, ValueError: as ``profile``, ``solve`` and ``apply``.
        """
        made = False
        if self._has_changed(optimizers):
            self._take_off()
        for batch in sorted(batches, key=_elements, reverse=True):
            if self.handle is None:
                self._plan_as_it_is(batch, step_on, optimizers)
                made = True
            elif not self._holds_for(batch):
                self._plan_another(batch, step_on)
                made = True
        return made

    def begin_batch(self, batch: Any) -> None:
        """This micro-batch is under way: calls of the model belong to it."""
        self._signatures.now = self._signatures.of_batch(batch)

    def facts(self) -> dict[str, float]:
        """The claims of the latest plan, by names with units; empty where there is none."""
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
            self._take_off()
        self._known.clear()
        self._now = self._budget_bytes = None

    def _take_off(self) -> None:
        assert self.handle is not None
        self._peak_bytes = self.measured_peak_bytes
        self.handle.remove()
        self.handle = None

    def _has_changed(self, optimizers: Optimizers) -> bool:
        model = None if self.handle is None else self.handle.model
        return model is not None and self._state != state_of(model, optimizers) and self._may_change()

    def _plan_as_it_is(self, batch: Any, step_on: StepOn, optimizers: Optimizers) -> None:
        """A plan for the model as it is now: the first one, or another one since it has changed."""
        workload = step_on(batch)
        model, signature = inner_model(workload.model), self._signatures.of_batch(batch)
        if self._budget_bytes is None:
            self._peak_bytes = None
        self._state = state_of(model, optimizers)
        known = self._known.get(self._state)
        if known is None or not known.signature.covers(signature):
            known = _Planned(signature, *self._planned(workload))
            if len(self._known) < _STATES:
                self._known[self._state] = known
        self._now, self.plan = known, known.plan
        if self._budget_bytes is None:
            self._budget_bytes = known.plan.budget_bytes
        self.handle = apply(workload.model, known.plan, watch=self.watch)

    def _planned(self, workload: Workload) -> tuple[Profile, Plan]:
        measured = profile(workload, limit=self.limit, numerics=self.numerics)
        chosen: dict[str, Any] = {
            "solver": self.solver, "offload": self.offload, "headroom": self.headroom, "numerics": self.numerics
        }  # fmt: skip
        if self._budget_bytes is None:
            plan = solve(measured, self.budget, **chosen)
        else:
            try:
                plan = solve(measured, self._budget_bytes, **chosen)
            except Infeasible as refusal:
                least_bytes = refusal.minimum_budget_bytes
                warn_caller(
                    f"{_PLACE}: the model has changed since its first step, and no plan keeps it within the budget of "
                    f"{format_bytes(self._budget_bytes)} any more: it needs {format_bytes(least_bytes)} and trains on "
                    "with the plan that needs least. Raise the budget, or make the batch smaller"
                )
                plan = solve(measured, least_bytes, **chosen)
        if self.verify and can_verify(workload, plan):
            plan = verified(workload, plan, solver=self.solver).plan
        return measured, plan

    def _holds_for(self, batch: Any) -> bool:
        if isinstance(self.handle, DynamicHandle):
            return self.handle.holds_for(batch)
        assert self._now is not None
        return self._now.signature.covers(self._signatures.of_batch(batch)) or not self._may_change()

    def _may_change(self) -> bool:
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        model = None if self.handle is None else self.handle.model
        return model is not None and not is_compiled(model) and (alone or torch.distributed.get_world_size() == 1)

    def _plan_another(self, batch: Any, step_on: StepOn) -> None:
        if not isinstance(self.handle, DynamicHandle):
            assert self.handle is not None and self._now is not None
            model, budget_bytes = self.handle.model, self.handle.plan.budget_bytes
            assert model is not None
            self._take_off()
            self.handle = apply_profiled(
                model,
                {self._now.signature: self._now.profile},
                reader=self._signatures,
                budget_bytes=budget_bytes,
                solver=self.solver,
                headroom=self.headroom,
            )
        self.plan = self.handle.profile_now(step_on(batch))


def _elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch))


def state_of(model: nn.Module, optimizers: Optimizers) -> Hashable:
    """All that a plan depends on and that a loop may change between two steps, but for the batch.

    Modules and parts in another mode than the model, rates that are 0, which parameters there are, which of them are
    the same, their shapes and types, which are trained, and which an optimizer has.
    """
    stepped = set(map(id, stepped_parameters(given_optimizers(optimizers or None))))
    places: dict[int, int] = {}
    modules: list[Hashable] = []
    for module in model.modules():
        own = [p for p in module._parameters.values() if p is not None]
        parameters = [
            (places.setdefault(id(p), len(places)), p.shape, p.dtype, p.requires_grad, id(p) in stepped) for p in own
        ]
        zeros = [name for name, value in vars(module).items() if type(value) is float and not value]
        of_part = () if module is model else (module.training == model.training, *zeros)
        modules.append((id(module), of_part, *parameters))
    return tuple(modules)


class _BatchSignatures:
    """Reads the signature of a call of the model off the batch under way, whatever the step makes of it for the model.

    Attributes:
        now: of the batch under way.
    """

    def __init__(self) -> None:
        self.now = signature_of({})

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """The signature of any call while that batch is under way."""
        return self.now

    def of_batch(self, inputs: Any) -> Signature:
        """The signature of a batch."""
        return signature_of({"batch": _without_data(inputs)})


def _without_data(batch: Any, *, in_samples: bool = False) -> Any:
    """A batch but for texts and whole numbers in its lists: they are of samples, and others come with every batch."""
    if isinstance(batch, Mapping):
        return {key: _without_data(item, in_samples=in_samples) for key, item in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_without_data(item, in_samples=True) for item in batch]
    return None if in_samples and isinstance(batch, (bool, int, str)) else batch


def require(install: str, *packages: str) -> None:
    """Refuse to go on where a package is missing.

    Args:
        install: what pip is to install, one name or several.
        packages: names by which they are imported.

    Raises:
        ImportError: with the command that installs them.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(
            f"planner.integrations: expected {' and '.join(packages)}, got no {' and no '.join(missing)}; "
            f"run pip install {install}"
        )
