"""What a search for the largest batch comes to: the limit of each way of training, and the refusal where none fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.plan import Plan
from planner.planning import Infeasible
from planner.sizes import format_bytes

Way = Literal["none", "recompute", "offload"]
WAYS: tuple[Way, ...] = ("none", "recompute", "offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest size that fits in one way of training.

    Attributes:
        way: ``none`` (no plan), ``recompute``, or ``offload`` (and recompute).
        size: of the key that is varied; 0 where not even the smallest fits, None where the way is not open.
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

    way: Way
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
        profiled: sizes that were profiled.
        linear: whether bytes grow as a line; ``notes`` say what does not, and what else to know.
        none, recompute, offload: the limit of each way.
        best: the size with the best throughput among the limits and, where one between them is predicted to be
            faster, that one.
    """

    vary: str
    step: int
    budget_bytes: int
    states_bytes: int
    profiled: tuple[int, ...]
    linear: bool
    notes: tuple[str, ...]
    none: Limit
    recompute: Limit
    offload: Limit
    best: Limit


class NoBatch(Infeasible):
    """Not even the smallest size fits the budget, whatever is recomputed or sent.

    Attributes:
        vary, size: the key and its smallest value.
        states_bytes: of the model, whatever the size.
    """

    def __init__(self, refusal: Infeasible, *, vary: str, size: int, states_bytes: int) -> None:
        self.vary, self.size, self.states_bytes = vary, size, states_bytes
        super().__init__(
            minimum_budget_bytes=refusal.minimum_budget_bytes,
            reason=refusal.reason,
            solver=refusal.solver,
            budget_bytes=refusal.budget_bytes,
            lower_bound_seconds=refusal.lower_bound_seconds,
            solve_seconds=refusal.solve_seconds,
        )

    @property
    def short_bytes(self) -> int:
        """By how much the budget is too small."""
        return self.minimum_budget_bytes - self.budget_bytes

    def _message(self) -> str:
        return (
            f"budget: expected at least {self._known} for {self.vary}={self.size}, the smallest, got "
            f"{self.budget_bytes} ({format_bytes(self.budget_bytes)}), {format_bytes(self.short_bytes)} too little: "
            f"{self._states}; raise the budget, or take a smaller model, another optimizer or another precision"
        )

    @property
    def _states(self) -> str:
        over, size = self.states_bytes - self.budget_bytes, format_bytes(self.states_bytes)
        if over > 0:
            return (
                f"the model's states alone (parameters, gradients, optimizer: {size}) are {format_bytes(over)} above it"
            )
        return f"the model's states (parameters, gradients, optimizer) take {size} of it, and {self.reason}"
