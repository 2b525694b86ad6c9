"""Why no plan was found and what is known instead, with the blocks that cannot be recomputed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from planner.units import format_bytes, format_seconds, names_in_short
from profiler.records import LeftOutRecord, Profile, StageRecord
from solvers.problem.solution import Solution

# A budget of so few bytes, where a real step needs so many, is a share whose % was forgotten.
_MOST_SHARE, _REAL_BYTES = 100, 2**16

# What helps where the batch makes no difference.
FEWER_STATES = (
    "raise the budget, or take another optimizer or precision (planner advise compares them), or a smaller model; an "
    "optimizer of torch's takes less meanwhile with fused=True, or foreach=False"
)


@dataclass(kw_only=True, eq=False, repr=False)
class Infeasible(ValueError):
    """Raised if no plan was found for a budget; carries the smallest budget known to be enough.

    Attributes:
        minimum_budget_bytes: the smallest budget that is known to be feasible.
        reason: the stage and phase, or the node, that requires that budget.
        solver: the name of the solver.
        budget_bytes: the requested budget.
        proven: True if it is proven that no plan fits; False if the search ended without a plan.
        lower_bound_seconds: of a whole step; None where nothing finite is known.
        solve_seconds: time that the solver took; None where it is not known.
        remedy: what to do.
        left_out: blocks that keep much and cannot be recomputed.
        unplanned_peak_bytes: the unplanned peak, if the budget was given as a share of it; 0 for a budget in bytes.
        subject: what set the budget: ``"budget"``, or the ``"device"`` that has no more.
    """

    minimum_budget_bytes: int
    reason: str
    solver: str
    budget_bytes: int
    proven: bool = True
    lower_bound_seconds: float | None = None
    solve_seconds: float | None = None
    remedy: str = "raise the budget, make the batch smaller"
    left_out: tuple[LeftOutRecord, ...] = ()
    unplanned_peak_bytes: int = 0
    subject: Literal["budget", "device"] = "budget"

    @property
    def status(self) -> Literal["infeasible", "unknown"]:
        """``infeasible``: it is proven that no plan fits; ``unknown``: it is not."""
        return "infeasible" if self.proven else "unknown"

    def __post_init__(self) -> None:
        super().__init__(self._message())

    def _message(self) -> str:
        said = "is too small" if self.proven else f"may be too small: {self._unproven}"
        more_time = "" if self.proven else "allow more time, or "
        or_auto = "" if self.solver == "auto" else " or try solver 'auto'"
        return (
            f"{self.subject}: {self._asked} {said}; the smallest budget known to be enough is {self._known}: "
            f"{self.reason}; {more_time}{self.remedy}{or_auto}"
        )

    def __reduce__(self) -> Any:
        attributes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(type(self), **attributes), ()

    @property
    def _unproven(self) -> str:
        spent = "" if self.solve_seconds is None else f" in {format_seconds(self.solve_seconds)}"
        bound = (
            ""
            if self.lower_bound_seconds is None
            else f" (a plan would take at least {self.lower_bound_seconds:.6g} s a step)"
        )
        return f"no plan was found{spent}, but it is not proven that none exists{bound}"

    @property
    def _asked(self) -> str:
        shared = self.budget_bytes <= _MOST_SHARE and self.minimum_budget_bytes >= _REAL_BYTES
        asking = f"; did you mean {self.budget_bytes}%?" if shared else ""
        asking = asking or self._share(self.budget_bytes, round)
        solver = "" if self.solver == "auto" else f" with solver {self.solver!r}"
        return f"{self.budget_bytes} bytes ({format_bytes(self.budget_bytes)}{asking}){solver}"

    @property
    def _known(self) -> str:
        share = self._share(self.minimum_budget_bytes, math.ceil)
        return f"{self.minimum_budget_bytes} bytes ({format_bytes(self.minimum_budget_bytes)}{share})"

    def _share(self, size: int, whole: Callable[[float], int]) -> str:
        """The share of the unplanned peak, where the budget was one, rounded so that it is within what is told."""
        if not self.unplanned_peak_bytes:
            return ""
        tenths = whole(size * 1000 / self.unplanned_peak_bytes)
        return f", {tenths / 10:g}% of the unplanned peak"


def require_schedule(
    solution: Solution, budget_bytes: int, solver: str, seconds_outside_chain: float = 0.0
) -> Solution:
    """Returns the solution itself, where it has a schedule.

    Raises:
        Infeasible: it has none.
        KeyboardInterrupt: by Ctrl-C.
    """
    if solution.schedule is not None:
        return solution
    if solution.interrupted:
        raise KeyboardInterrupt
    assert solution.shortage is not None
    bound = solution.lower_bound_seconds + seconds_outside_chain
    raise Infeasible(
        minimum_budget_bytes=solution.shortage.minimum_budget_bytes,
        reason=solution.shortage.reason,
        solver=solver,
        budget_bytes=budget_bytes,
        proven=solution.status == "infeasible",
        lower_bound_seconds=bound if math.isfinite(bound) else None,
        solve_seconds=solution.solve_seconds,
        remedy=FEWER_STATES if solution.shortage.moment == "optimizer" else Infeasible.remedy,
    )


# Of what all stages keep: a stage that keeps less of it is not what stands in the way.
LEAST_SHARE = 0.05
_NAMED = 2  # kinds of blocks that an error names


def never_rerun(profile: Profile) -> tuple[LeftOutRecord, ...]:
    """Returns the blocks and stages that keep much and cannot be recomputed, the one with most bytes first."""
    records = sorted([*profile.left_out, *_stages(profile)], key=lambda record: -record.kept_bytes)
    return tuple(records)


def blocks_in_words(record: LeftOutRecord) -> str:
    """Their names and class.

    >>> blocks_in_words(LeftOutRecord(names=("h.0", "h.1"), module_class="Block", kept_bytes=8, reason="it draws"))
    'h.0, 1 (2 Block)'
    """
    names = record.names
    of_class = record.module_class if len(names) == 1 else f"{len(names)} {record.module_class}"
    return f"{names_in_short(names, '')} ({of_class})"


def obstacle_in_words(records: Sequence[LeftOutRecord]) -> str:
    """Which blocks cannot run again and why, for a sentence; empty where there are none."""
    said = [f"{blocks_in_words(record)} cannot run again: {record.reason}" for record in records[:_NAMED]]
    more = f" (and {len(records) - _NAMED} kinds of blocks more)" if len(records) > _NAMED else ""
    return "; ".join(said) + more


def remedy_in_words(records: Sequence[LeftOutRecord]) -> str:
    """The changes that would help, for a sentence; empty where nothing is known."""
    remedies = dict.fromkeys(record.remedy for record in records[:_NAMED] if record.remedy)
    return "; ".join(remedies)


def _stages(profile: Profile) -> list[LeftOutRecord]:
    """Stages that never run again, equal ones together."""
    groups: dict[tuple[str, str, str], list[StageRecord]] = {}
    for stage in profile.stages:
        if stage.kind == "stage" and not stage.recomputable and stage.reason and stage.kept_bytes:
            groups.setdefault((stage.module_class, stage.reason, stage.remedy), []).append(stage)
    records = [
        LeftOutRecord(
            names=tuple(stage.name for stage in stages),
            module_class=module_class,
            kept_bytes=sum(stage.kept_bytes for stage in stages),
            reason=reason,
            remedy=remedy,
        )
        for (module_class, reason, remedy), stages in groups.items()
    ]
    least_bytes = LEAST_SHARE * sum(stage.kept_bytes for stage in profile.stages)
    return [record for record in records if record.kept_bytes >= least_bytes]
