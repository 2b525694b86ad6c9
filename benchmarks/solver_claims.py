"""What graph solving is asked to reach, and verdicts on it computed from the rows of ``benchmarks.solvers``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.solver_runs import Outcome

CLAIM_SECONDS = 60.0
OVERRUN_SECONDS = 2.0  # after its time limit a solver ends the step under way and replays its plan
TRUSTED = 1e-6  # relative: what the integer programs are solved to


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One solver on one problem and budget, and what came of it.

    Attributes:
        share: the budget, of the way from the largest op to the unplanned peak.
        unplanned_peak_bytes, unplanned_seconds: with every node run once.
        limit_seconds: None where the solver chose.
    """

    problem: str
    nodes: int
    solver: str
    share: float
    budget_bytes: int
    unplanned_peak_bytes: int
    unplanned_seconds: float
    limit_seconds: float | None
    outcome: Outcome

    @property
    def objective(self) -> float | None:
        """Seconds relative to the unplanned ones; None without a schedule."""
        return None if self.outcome.seconds is None else self.outcome.seconds / self.unplanned_seconds

    @property
    def bound(self) -> float | None:
        """The lower bound relative to the unplanned seconds; None without one."""
        return None if self.outcome.bound_seconds is None else self.outcome.bound_seconds / self.unplanned_seconds

    @property
    def gap(self) -> float | None:
        """Relative distance of the schedule from the bound; None without a schedule."""
        if self.objective is None or self.bound is None:
            return None
        return max(0.0, 1 - self.bound / self.objective)


Best = Mapping[tuple[str, int], float]


def best_known(runs: Sequence[Run]) -> dict[tuple[str, int], float]:
    """Per problem and budget the lowest relative seconds of any run."""
    best: dict[tuple[str, int], float] = {}
    for run in runs:
        if run.objective is not None:
            key = run.problem, run.budget_bytes
            best[key] = min(best.get(key, math.inf), run.objective)
    return best


def contradictions(runs: Sequence[Run]) -> list[Run]:
    """Runs whose bound, claimed for every schedule, lies above a plan of another run at the same budget."""
    best = best_known(runs)

    def most(run: Run) -> float:
        return best.get((run.problem, run.budget_bytes), math.inf) * (1 + TRUSTED)

    return [run for run in runs if run.bound is not None and run.bound > most(run)]


def _gap(run: Run, _: Best) -> float:
    return math.inf if run.gap is None else run.gap


def _behind_best(run: Run, best: Best) -> float:
    return math.inf if run.objective is None else run.objective / best[run.problem, run.budget_bytes] - 1


def _seconds(run: Run, _: Best) -> float:
    wall = run.outcome.wall_seconds
    return math.inf if wall is None or run.objective is None else wall


def _sized(least: int, most: int) -> Callable[[Run], bool]:
    return lambda run: least <= run.nodes <= most and _in_time(run)


def _in_time(run: Run) -> bool:
    return run.limit_seconds is not None and run.limit_seconds <= CLAIM_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A number for ``auto`` to reach on every problem that it concerns.

    Attributes:
        concerns: whether a run of ``auto`` is one of those the claim is about.
        measure: a run's value; infinite without a schedule.
        most: the value that must not be exceeded.
        unit: ``%``, of shares, or ``s``.
    """

    text: str
    concerns: Callable[[Run], bool]
    measure: Callable[[Run, Best], float]
    most: float
    unit: str


CLAIMS = (
    # VGG-16 (99 nodes) and the U-Net (160) count as graphs of 100 to 150 nodes, the GPT of 2610 as one of about 2000.
    Claim(text="100-150 nodes, 60 s: gap to the bound", concerns=_sized(95, 165), measure=_gap, most=0.001, unit="%"),
    Claim(
        text="350-400 nodes, 60 s: gap to the best known",
        concerns=_sized(350, 400),
        measure=_behind_best,
        most=0.01,
        unit="%",
    ),
    Claim(
        text="about 2000 nodes, 60 s: feasible, gap to the bound",
        concerns=_sized(1500, 3000),
        measure=_gap,
        most=0.05,
        unit="%",
    ),
    Claim(
        text="GPT of 4 layers: seconds",
        concerns=lambda run: run.problem.startswith("gpt4-") and _in_time(run),
        measure=_seconds,
        most=2.0,
        unit="s",
    ),
    Claim(
        text="GPT of 48 layers, no limit given: seconds",
        concerns=lambda run: run.problem.startswith("gpt48-") and run.limit_seconds is None,
        measure=_seconds,
        most=30.0,
        unit="s",
    ),
)


def verdicts(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per claim and budget: its worst problem, and whether that one reaches the number."""
    best, by_auto = best_known(runs), [run for run in runs if run.solver == "auto"]
    shares = sorted({run.share for run in by_auto})
    return [_verdict(claim, share, by_auto, best) for claim in CLAIMS for share in shares]


def _verdict(claim: Claim, share: float, by_auto: Sequence[Run], best: Best) -> dict[str, Any]:
    concerned = [run for run in by_auto if run.share == share and claim.concerns(run)]
    # Where no plan exists, and that is proven, the question is answered.
    infeasible = [run for run in concerned if run.outcome.status == "infeasible"]
    asked = [run for run in concerned if run not in infeasible]
    values = [claim.measure(run, best) for run in asked]
    worst = max(range(len(asked)), key=values.__getitem__, default=None)
    kept = [value <= claim.most and _punctual(run) for run, value in zip(asked, values, strict=True)]
    return {
        "claim": claim.text,
        "budget": f"{share:.0%}",
        "problems": len(asked),
        "infeasible": len(infeasible),
        "reached_by": sum(kept),
        "worst": "" if worst is None else asked[worst].problem,
        "value": "" if worst is None else _shown(values[worst], claim.unit),
        "at_most": _shown(claim.most, claim.unit),
        "longest_seconds": max((run.outcome.wall_seconds or 0.0 for run in concerned), default=""),
        "verdict": "not measured" if not concerned else "reached" if all(kept) else "missed",
    }


def _punctual(run: Run) -> bool:
    wall = run.outcome.wall_seconds
    return wall is not None and (run.limit_seconds is None or wall <= run.limit_seconds + OVERRUN_SECONDS)


def _shown(value: float, unit: str) -> str:
    if math.isinf(value):
        return "no plan"
    return f"{100 * value:.3f} %" if unit == "%" else f"{value:.2f} s"
