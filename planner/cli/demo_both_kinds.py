"""The demo's second part: plans of stages and of single ops beside each other, on a network that is no chain."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from rich.console import RenderableType

from planner import GraphPlan, NothingFound, Plan, Workload, zoo
from planner.cli.shell import show, working
from planner.compiled.applying import apply
from planner.explain.tables import plain_table
from planner.plans.profiling import profile
from planner.plans.refusals import Infeasible
from planner.plans.solving import solve
from planner.units import format_bytes, format_seconds
from profiler.graph_profile import GraphProfile
from profiler.measurement.step_measurement import measure
from profiler.records import Profile

BUDGET_PART = 0.2  # of the way from the smallest budget that both kinds meet up to the unplanned peak
SEARCH_SECONDS = 5.0  # for the plan of single ops; what it finds later is a little faster
ROUNDS = 9
SEED = 0
PLAIN, STAGES, OPS = "no plan", "stages", "single ops"


def densenet() -> Workload:
    """A network with concatenations; its step takes a tenth of a second."""
    return zoo.build("densenet", batch=8)


class _Ran(NamedTuple):
    """Steps under a plan; seconds are the median of steps that were taken in turns with those of the others."""

    peak_bytes: int
    seconds: float
    losses: tuple[float, ...]
    parameters: list[torch.Tensor]


def run_both_kinds(build: Callable[[], Workload] = densenet) -> dict[str, Any]:
    """Plan one network both ways for one budget, run both plans, and print one beside the other.

    Returns:
        The same as plain data.

    Raises:
        ValueError: training with a plan gives another result than without.
    """
    workload = build()
    with working() as progress:
        stages = profile(workload, progress=progress)
        ops = profile(workload, graph=True, progress=progress)
        progress("solve", 0, 2)
        least = {STAGES: smallest_budget(stages), OPS: smallest_budget(ops)}
        lowest = max(least.values())
        budget_bytes = lowest + int(BUDGET_PART * (stages.unplanned_peak_bytes - lowest))
        progress("solve", 1, 2)
        plans = {STAGES: solve(stages, budget_bytes), OPS: _solved(ops, budget_bytes)}
        ran = _run(build, {PLAIN: None, **plans}, progress)
    show(f"   unplanned peak {format_bytes(stages.unplanned_peak_bytes)}")
    show(_table(least, plans, ran, budget_bytes))
    _check_same(ran)
    return {
        "unplanned_peak_bytes": stages.unplanned_peak_bytes,
        "unplanned_seconds": ran[PLAIN].seconds,
        "budget_bytes": budget_bytes,
        "plans": [
            {
                "plan_of": name,
                "minimum_budget_bytes": least[name],
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                "measured_peak_bytes": ran[name].peak_bytes,
                "recomputed_ops": plan.recomputed_ops,
                "recomputed_seconds": plan.recomputed_seconds,
                "measured_seconds": ran[name].seconds,
            }
            for name, plan in plans.items()
        ],
    }


def smallest_budget(profile: Profile | GraphProfile) -> int:
    """The smallest budget that a refusal names."""
    try:
        solve(profile, 1)  # Nothing fits one byte.
    except Infeasible as refusal:
        return refusal.minimum_budget_bytes
    raise AssertionError("one byte was enough for a training step")


def _solved(ops: GraphProfile, budget_bytes: int) -> GraphPlan:
    try:
        return solve(ops, budget_bytes, time_limit_seconds=SEARCH_SECONDS)
    except NothingFound:  # A slow machine: take the time that a search takes by itself.
        return solve(ops, budget_bytes)


def _run(
    build: Callable[[], Workload],
    plans: Mapping[str, Plan | GraphPlan | None],
    progress: Callable[[str, int, int], None],
) -> dict[str, _Ran]:
    """The peak of each, then the same steps of each in turns; the second of two counts, as in ``compare``."""
    total = len(plans) + ROUNDS
    works, peaks = {name: build() for name in plans}, dict[str, int]()
    for done, (name, plan) in enumerate(plans.items()):
        progress(f"measure with {name}", done, total)
        if plan is not None:
            apply(works[name].model, plan)
        peaks[name] = measure(works[name], repeats=1).peak_bytes
    losses, seconds = ({name: list[float]() for name in plans} for _ in range(2))
    for done in range(ROUNDS):
        progress("time in turns", len(plans) + done, total)
        for name, work in works.items():
            torch.manual_seed(SEED)
            losses[name].append(work.step())
            begin = time.perf_counter()
            losses[name].append(work.step())
            seconds[name].append(time.perf_counter() - begin)
    return {
        name: _Ran(
            peaks[name],
            statistics.median(seconds[name]),
            tuple(losses[name]),
            [each.detach() for each in work.model.parameters()],
        )
        for name, work in works.items()
    }


def _table(
    least: Mapping[str, int], plans: Mapping[str, Plan | GraphPlan], ran: Mapping[str, _Ran], budget_bytes: int
) -> RenderableType:
    plain = ran[PLAIN]
    table = plain_table("", [""], ["plan of stages", "plan of single ops"])

    def row(what: str, text: Callable[[str], str]) -> None:
        table.add_row(what, *(text(name) for name in plans))

    def more(seconds: float) -> str:
        return f"{format_seconds(seconds)} ({seconds / plain.seconds:+.0%})"

    row("smallest budget", lambda name: format_bytes(least[name]))
    table.add_row("", "", "")
    row("budget", lambda name: format_bytes(budget_bytes))
    row("predicted peak", lambda name: f"{plans[name].predicted_peak_bytes:,} bytes")
    row("measured peak", lambda name: f"{ran[name].peak_bytes:,} bytes")
    row("ops run again", lambda name: str(plans[name].recomputed_ops))
    row("predicted extra time", lambda name: more(plans[name].recomputed_seconds))
    row("measured extra time", lambda name: more(ran[name].seconds - plain.seconds))
    row("losses, parameters", lambda name: "bit for bit" if _same(ran[name], plain) else "others")
    return table


def _same(planned: _Ran, plain: _Ran) -> bool:
    pairs = zip(planned.parameters, plain.parameters, strict=True)
    return planned.losses == plain.losses and all(torch.equal(a, b) for a, b in pairs)


def _check_same(ran: Mapping[str, _Ran]) -> None:
    if others := [name for name in ran if not _same(ran[name], ran[PLAIN])]:
        raise ValueError(
            f"demo: expected the same losses and parameters with a plan as without, got others with a plan of "
            f"{others[0]}; please report it with the version of torch"
        )
