"""A long run: the same training without a plan and under one, its losses and the peaks of some of its steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import planner
from benchmarks.one_step import peak_bytes_of
from planner.zoo import build
from profiler.workload.workload import Workload

STEPS = 1000
METERED = (2, 3, 10, 500, 1000)  # the first step makes the optimizer's states


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """What both trainings gave.

    Attributes:
        plan: that the planned one ran under.
        plain_losses, planned_losses: of every step.
        plain_peaks, planned_peaks: measured bytes of the steps in ``METERED``.
    """

    plan: planner.Plan
    plain_losses: tuple[float, ...]
    planned_losses: tuple[float, ...]
    plain_peaks: tuple[int, ...]
    planned_peaks: tuple[int, ...]

    @property
    def note(self) -> str:
        """One sentence for a result file."""
        same = "equal bit for bit" if self.plain_losses == self.planned_losses else "NOT equal"
        return (
            f"{len(self.planned_losses):,} steps of a small gpt2 with dropout and Adam, every block recomputed: losses "
            f"{same} (from {self.planned_losses[0]:.3f} to {self.planned_losses[-1]:.3f}); measured peaks of steps "
            f"{', '.join(map(str, METERED))}: {sorted({*self.planned_peaks})} bytes, predicted "
            f"{self.plan.predicted_peak_bytes} (without the plan {sorted({*self.plain_peaks})})"
        )


def long_run(steps: int = STEPS) -> LongRun:
    """Train twice from the same weights and random numbers on the CPU, without a plan and with every block recomputed.

    The model is small, so that a step takes milliseconds; it has GPT-2's dropout and Adam's states.
    """
    workload = _workload()
    rules = planner.Rules(rules=[planner.Rule(modules="transformer.h.*")])
    plan = planner.state(planner.profile(workload, rules=rules, menus=False), rules)
    plain_losses, plain_peaks = _trained(_workload(), steps)
    planned = _workload()
    with planner.apply(planned.model, plan):
        losses, peaks = _trained(planned, steps)
    return LongRun(
        plan=plan, plain_losses=plain_losses, planned_losses=losses, plain_peaks=plain_peaks, planned_peaks=peaks
    )


def _workload() -> Workload:
    workload = build("gpt2", layers=2, hidden=16, heads=2, seq=16, batch=4, vocab=32)
    workload.optimizer = torch.optim.Adam(workload.model.parameters(), lr=3e-3, fused=True)
    return workload


def _trained(workload: Workload, steps: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The losses of all steps, and the peaks of those that are metered."""
    losses: list[float] = []
    peaks: list[int] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for step in range(1, steps + 1):
            if step in METERED:
                peaks.append(_metered_step(workload, losses))
            else:
                losses.append(workload.step())
    return tuple(losses), tuple(peaks)


def _metered_step(workload: Workload, losses: list[float]) -> int:
    workload.zero_grad()
    return peak_bytes_of(workload, lambda: losses.append(workload.step()))
