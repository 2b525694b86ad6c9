"""Levers: what a user can change to fit a memory budget, and combinations of them with predicted peak and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.plans.plan import Plan

LeverKind = Literal["precision", "optimizer", "micro-batches", "in pieces", "recompute", "offload"]
Exactness = Literal["same", "rounding", "other"]
CostBasis = Literal["measured", "computed", "solved"]
Recipe = Literal["none", "recompute", "offload", "recompute and offload", "in pieces", "in pieces and recompute"]
RESULTS: tuple[Exactness, ...] = ("same", "rounding", "other")
RECIPES: dict[Recipe, tuple[LeverKind, ...]] = {
    "none": (),
    "recompute": ("recompute",),
    "offload": ("offload",),
    "recompute and offload": ("recompute", "offload"),
    "in pieces": ("in pieces",),
    "in pieces and recompute": ("in pieces", "recompute"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One thing that can be changed.

    Attributes:
        kind: what it changes.
        name: in the words of the tables, as ``autocast bfloat16``.
        applies: whether this workload can be changed so.
        reason: why not; empty where it can.
        result: what becomes of losses and gradients: the ``same`` bit for bit where kernels are deterministic, the
            same up to ``rounding``, or ``other`` ones.
        change: what to write to make it.
    """

    kind: LeverKind
    name: str
    applies: bool = True
    reason: str = ""
    result: Exactness = "other"
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Some levers together, and what a training step is predicted to take with them.

    Attributes:
        precision: what autocast casts to in place of the workload's own precision; empty for that.
        optimizer: name of another optimizer; empty for the workload's own.
        micro_batches: parts of the batch that run one after the other before the optimizer's step.
        recipe: what happens to activations.
        budget_bytes: what it has to fit.
        peak_bytes: of the whole step. Where nothing fits, the least that recomputing and offloading can reach.
        seconds: of an effective batch, all its micro-batches and the optimizer's step; None where it does not fit and
            was not worked out.
        peak_basis, seconds_basis: ``measured`` in a profile of this very step; ``computed`` from measured parts, or
            extrapolated from smaller batches; ``solved``: predicted by a plan from a profile of this step.
        result: the worst of its levers'.
        plan: for one micro-batch; None without one.
    """

    precision: str = ""
    optimizer: str = ""
    micro_batches: int = 1
    recipe: Recipe = "none"
    budget_bytes: int
    peak_bytes: int
    seconds: float | None
    peak_basis: CostBasis
    seconds_basis: CostBasis
    result: Exactness
    plan: Plan | None = None

    @property
    def fits(self) -> bool:
        """Whether its peak is within the budget."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def as_built(self) -> bool:
        """Whether its plan is for the step as its target builds it."""
        return not (self.precision or self.optimizer) and self.micro_batches == 1

    @property
    def short_bytes(self) -> int:
        """By how much it misses the budget; 0 where it fits."""
        return max(0, self.peak_bytes - self.budget_bytes)

    @property
    def kinds(self) -> tuple[LeverKind, ...]:
        """Which kinds of levers it has."""
        changed: dict[LeverKind, bool] = {
            "precision": bool(self.precision),
            "optimizer": bool(self.optimizer),
            "micro-batches": self.micro_batches > 1,
        }
        return (*(kind for kind, is_changed in changed.items() if is_changed), *RECIPES[self.recipe])

    @property
    def names(self) -> tuple[str, ...]:
        """Its levers in words."""
        words = [f"autocast {self.precision}"] if self.precision else []
        words += [self.optimizer] if self.optimizer else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return (*words, *RECIPES[self.recipe])

    @property
    def title(self) -> str:
        """All of them in one line."""
        return " + ".join(self.names) or "nothing changed"

    @property
    def keeps_result(self) -> bool:
        """Whether training goes as before, up to rounding."""
        return self.result != "other"


def worst(results: list[Exactness]) -> Exactness:
    """What several levers together make of the result.

    >>> worst(["same", "rounding"]), worst([])
    ('rounding', 'same')
    """
    return RESULTS[max((RESULTS.index(result) for result in results), default=0)]


def rank(combination: Combination) -> tuple[bool, float, int, int]:
    """Sort key: what fits first, the fastest of it first; of the rest what misses by the least."""
    seconds = combination.seconds if combination.fits and combination.seconds is not None else 0.0
    return not combination.fits, seconds, combination.short_bytes, len(combination.kinds)
