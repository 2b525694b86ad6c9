"""The results of a search for the largest batch: the limit in each training mode, and the refusal where none fits."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible
from planner.units import format_bytes

TrainingMode = Literal["none", "recompute", "offload"]
MODE_NAMES: dict[TrainingMode, str] = {"none": "no plan", "recompute": "recompute", "offload": "recompute and offload"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest size that fits in one training mode.

    Attributes:
        mode: ``none`` (no plan), ``recompute``, or ``offload`` (and recompute).
        size: of the key that is varied; 0 where not even the smallest fits, None where the mode is not to be had.
        predicted_size: what the fit and the solver said before anything was tried.
        peak_bytes, samples_per_second: of a real step at ``size``; predicted where ``confirmed`` is False.
        predicted_peak_bytes: at ``size``.
        throughput: what ``best`` is chosen by: samples per second, times their size for a key that makes them larger.
        relative: throughput over that of the unplanned limit; None where nothing fits unplanned.
        confirmed: a real step at ``size`` was within the budget.
        next_fails: a real step at the next size was not, or ran out of memory.
        reason: why there is no limit, or why it was not confirmed or the next size not tried; empty otherwise.
        plan: for ``size``; None without one.
    """

    mode: TrainingMode
    size: int | None
    predicted_size: int | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    samples_per_second: float | None = None
    throughput: float = 0.0
    relative: float | None = None
    confirmed: bool = False
    next_fails: bool = False
    reason: str = ""
    plan: Plan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxBatch:
    """The largest sizes that fit a budget, and the fastest one.

    Attributes:
        vary: the key of ``--set``.
        step: sizes are multiples of it.
        states_bytes: parameters, buffers, gradients and optimizer states.
        headroom_bytes: of the budget, what no step was to use.
        profiled: sizes that were profiled.
        linear: whether bytes grow as a line; ``notes`` say what does not, and what else to know.
        none, recompute, offload: the limit of each mode.
        best: the size with the best throughput among the limits and, where one between them is predicted to be
            faster, that one.
    """

    vary: str
    step: int
    budget_bytes: int
    states_bytes: int
    headroom_bytes: int = 0
    profiled: tuple[int, ...]
    linear: bool
    notes: tuple[str, ...]
    none: Limit
    recompute: Limit
    offload: Limit
    best: Limit

    @property
    def largest(self) -> Limit:
        """The limit of the largest size; among equals the first in the order none, recompute, offload."""
        return max((self.none, self.recompute, self.offload), key=lambda limit: limit.size or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of a model's states, independent of the batch.

    Attributes:
        total_bytes: parameters, buffers, gradients and optimizer states.
        optimizer_bytes: the optimizer's alone.
        halves: they would take half in bf16.
    """

    total_bytes: int
    optimizer_bytes: int
    halves: bool


class NoBatch(Infeasible):
    """No plan was found even for the smallest size; ``status`` says whether it is proven that there is none.

    Attributes:
        refusal: of the plan at the smallest size.
        vary, size: the key and its smallest value.
        states: of the model.
    """

    def __init__(self, refusal: Infeasible, *, vary: str, size: int, states: StateBytes) -> None:
        self.refusal, self.vary, self.size, self.states = refusal, vary, size, states
        super().__init__(
            minimum_budget_bytes=refusal.minimum_budget_bytes,
            reason=refusal.reason,
            solver=refusal.solver,
            budget_bytes=refusal.budget_bytes,
            proven=refusal.proven,
            lower_bound_seconds=refusal.lower_bound_seconds,
            solve_seconds=refusal.solve_seconds,
        )

    def __reduce__(self) -> Any:
        return functools.partial(NoBatch, self.refusal, vary=self.vary, size=self.size, states=self.states), ()

    @property
    def short_bytes(self) -> int:
        """By how much the budget is too small."""
        return self.minimum_budget_bytes - self.budget_bytes

    @property
    def states_bytes(self) -> int:
        """Bytes of the model's states, independent of the batch."""
        return self.states.total_bytes

    @property
    def levers(self) -> dict[str, int]:
        """Bytes that would about do at the smallest size, by what is changed; what changes nothing is left out.

        What the optimizer's states take is free at any moment without them; values of two bytes instead of four halve
        nearly everything.
        """
        without = self.minimum_budget_bytes - self.states.optimizer_bytes
        needed_bytes: dict[str, int] = {}
        if self.states.optimizer_bytes:
            needed_bytes["SGD without momentum"] = without
        if self.states.halves:
            needed_bytes["bf16 throughout"] = self.minimum_budget_bytes // 2
        if self.states.optimizer_bytes and self.states.halves:
            needed_bytes["both"] = without // 2
        return needed_bytes

    def _message(self) -> str:
        return (
            f"budget: expected at least {self._known} for {self.vary}={self.size}, the smallest, got "
            f"{self.budget_bytes} ({format_bytes(self.budget_bytes)}), {format_bytes(self.short_bytes)} too little: "
            f"{self._states}; {self._remedy}"
        )

    @property
    def _states(self) -> str:
        total = self.states.total_bytes
        over, size = total - self.budget_bytes, format_bytes(total)
        if over > 0:
            return (
                f"the model's states alone (parameters, gradients, optimizer: {size}) are {format_bytes(over)} above it"
            )
        return f"the model's states (parameters, gradients, optimizer) take {size} of it, and {self.reason}"

    @property
    def _remedy(self) -> str:
        fit = [name for name, needed in self.levers.items() if needed <= self.budget_bytes]
        known = ", ".join(f"{name} ({format_bytes(needed)})" for name, needed in self.levers.items())
        if fit:
            return f"raise the budget, or take what would about fit: {', '.join(fit)}"
        return f"raise the budget or take a smaller model{f': not even these would fit: {known}' if known else ''}"
