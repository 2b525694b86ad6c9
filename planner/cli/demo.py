"""The demo: a GPT-2 profiled, planned, trained with and without the plan, and its curve drawn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import RenderableType

from planner import Plan, Workload, zoo
from planner.cli.output import Output
from planner.cli.solutions import summary_of_plan
from planner.cli.tables import frontier_report, solution_report
from planner.explain.pareto_plot import draw_pareto
from planner.explain.tables import facts
from planner.plans.pareto_curves import pareto
from planner.plans.profiling import profile
from planner.plans.solving import find_plan
from planner.runtime.applier import apply
from planner.training.solver_comparison import seconds_in_turns
from planner.training.training import train_steps
from planner.units import format_bytes, format_seconds
from profiler.measurement.step_measurement import measure

FOLDER = Path("planner-demo")
STEPS = 5
BUDGET_PART = 0.4  # of the way from the smallest feasible peak up to the unplanned one
SEED = 0


class _Trained(NamedTuple):
    peak_bytes: int
    losses: tuple[float, ...]
    parameters: list[torch.Tensor]


def run_demo(
    out: Output, folder: Path = FOLDER, build: Callable[[], Workload] = lambda: zoo.build("gpt2")
) -> dict[str, Any]:
    """The whole way on a real model, printed as it goes.

    Returns:
        The same as plain data.

    Raises:
        ValueError: the folder cannot be made, transformers is missing, or
            training with the plan gives another result than without.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: the folder cannot be made: {error.strerror}; run the demo elsewhere") from error
    out.show("1. Profile: measure one training step of a GPT-2 (12 layers) on the CPU")
    with out.working() as progress:
        measured = profile(build(), progress=progress)
    frame = pareto(measured)
    smallest, whole = min(map(int, frame["budget_bytes"])), measured.unplanned_peak_bytes
    unplanned = f"{format_bytes(whole)}, {format_seconds(measured.unplanned_seconds)} a step"
    out.show(f"   unplanned peak {unplanned}; plans reach down to {format_bytes(smallest)}\n")
    plan = find_plan(measured, smallest + int(BUDGET_PART * (whole - smallest)))
    out.show(
        f"2. Plan for a budget of {format_bytes(plan.budget_bytes)}\n",
        solution_report(summary_of_plan(plan)),
    )
    out.show(f"\n3. Train {STEPS} steps without the plan and with it")
    with out.working() as progress:
        progress("train without a plan", 0, 3)
        plain = _train(build(), None)
        progress("train with the plan", 1, 3)
        planned = _train(build(), plan)
        progress("time in turns", 2, 3)
        seconds = seconds_in_turns(build(), {"without": None, "with": plan})
    out.show(_outcome(plan, plain, planned, seconds))
    if not _same(plain, planned):
        raise ValueError(
            "demo: losses or parameters with the plan differ from those without; "
            "please report it with the versions of torch and transformers"
        )
    out.show("\n4. Pareto curve", frontier_report(frame, "Memory against time, by solver"))
    title = f"{measured.model_class} on {measured.device} ({measured.device_name})"
    picture = folder / "pareto.png"
    draw_pareto(frame, picture, title=title, budget_bytes=plan.budget_bytes)
    out.show(f"   drawn to {picture}")
    return {
        "status": "trained",
        "plan": summary_of_plan(plan).to_document(),
        "losses": list(planned.losses),
        "unplanned": {"measured_peak_bytes": plain.peak_bytes, "measured_seconds": seconds["without"]},
        "planned": {"measured_peak_bytes": planned.peak_bytes, "measured_seconds": seconds["with"]},
        "picture": str(picture),
    }


def _train(workload: Workload, plan: Plan | None) -> _Trained:
    """Train from the same seed, so that dropout draws the same masks."""
    with torch.random.fork_rng(), nullcontext() if plan is None else apply(workload.model, plan):
        peak_bytes = measure(workload, repeats=1).peak_bytes
        torch.manual_seed(SEED)
        losses, _ = train_steps(workload, STEPS)
    return _Trained(peak_bytes, losses, [p.detach() for p in workload.model.parameters()])


def _outcome(plan: Plan, plain: _Trained, planned: _Trained, seconds: dict[str, float]) -> RenderableType:
    error = (plan.predicted_peak_bytes - planned.peak_bytes) / planned.peak_bytes
    slowdown = seconds["with"] / seconds["without"]
    return facts(
        [
            ("   losses without", ", ".join(f"{loss:.9g}" for loss in plain.losses)),
            ("   losses with", ", ".join(f"{loss:.9g}" for loss in planned.losses)),
            ("   the same", "losses and parameters, bit for bit" if _same(plain, planned) else "no"),
            ("   peak without", f"{format_bytes(plain.peak_bytes)} measured"),
            (
                "   peak with",
                f"{format_bytes(planned.peak_bytes)} measured, {format_bytes(plan.predicted_peak_bytes)} "
                f"predicted ({error:+.2%}), budget {format_bytes(plan.budget_bytes)}",
            ),
            ("   time without", f"{format_seconds(seconds['without'])} a step measured"),
            (
                "   time with",
                f"{format_seconds(seconds['with'])} a step measured ({slowdown:.2f} x), "
                f"{format_seconds(plan.predicted_seconds)} predicted ({plan.slowdown:.2f} x)",
            ),
        ]
    )


def _same(plain: _Trained, planned: _Trained) -> bool:
    pairs = zip(plain.parameters, planned.parameters, strict=True)
    return plain.losses == planned.losses and all(torch.equal(a, b) for a, b in pairs)
