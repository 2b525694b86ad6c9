"""Compiled models: peaks, gradients and seconds of plans under torch.compile, whole and block by block."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn

import planner
from benchmarks.budgets import smallest_budget
from benchmarks.reporting import RESULTS, result_name, write_result
from planner.zoo import build
from profiler.workload.random_states import RandomState

SETTINGS: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 4},
    "bert": {"layers": 4},
    "resnet50": {"image": 64, "batch": 8, "hidden": 16},
}
BACKENDS = ("aot_eager", "inductor")
WAYS = ("whole", "blocks")
# Places between the smallest budget and the unplanned peak of the profile.
PLACES = {"smallest": 0.0, "half": 0.5}


def blocks_of(model: Any) -> list[nn.Module]:
    """What one would compile block by block."""
    if hasattr(model, "transformer"):
        return list(model.transformer.h)
    if hasattr(model, "bert"):
        return list(model.bert.encoder.layer)
    return [layer for stage in model.resnet.encoder.stages for layer in stage.layers]


def compiled(name: str, device: str, backend: str, way: str) -> planner.Workload:
    """A new workload, always with the same weights, whose model or blocks are compiled."""
    workload = build(name, device=device, **SETTINGS[name])
    for module in [workload.model] if way == "whole" else blocks_of(workload.model):
        module.compile(backend=backend)
    return workload


def gradients_of(workload: planner.Workload) -> list[Tensor]:
    """Of one step from fixed random numbers; the workload must be new."""
    randomness = RandomState()
    torch.manual_seed(0)
    workload.zero_grad()
    workload.forward().backward()
    randomness.restore()
    return [p.grad for p in workload.model.parameters() if p.grad is not None]


def difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest over all parameters, relative to the parameter's largest gradient."""
    pairs = zip(expected, found, strict=True)
    return max(((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in pairs)


def budgets_of(profile: planner.Profile) -> dict[str, int]:
    """From the smallest feasible budget up."""
    low, high = smallest_budget(profile), profile.unplanned_peak_bytes
    return {name: int(low + place * (high - low)) for name, place in PLACES.items()}


def rows_of(name: str, device: str, backend: str, way: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Plans from the profile of the compiled model, and from that of the uncompiled one."""
    uncompiled = planner.profile(build(name, device=device, **SETTINGS[name]), menus=False)
    torch._dynamo.reset()
    # Before there is a plan: code that was compiled under one goes on ending where its stages begin.
    expected = gradients_of(compiled(name, device, backend, way))
    plain = planner.measure(compiled(name, device, backend, way), repeats=repeats)
    profile = planner.profile(compiled(name, device, backend, way))
    for kind, each in (("compiled", profile), ("uncompiled", uncompiled)):
        for place, budget in budgets_of(each).items():
            plan = planner.solve(each, budget)
            yield {
                "model": name,
                "backend": backend,
                "way": way,
                "profile": kind,
                "budget": place,
                "uncompiled_peak_bytes": uncompiled.unplanned_peak_bytes,
                "unplanned_peak_bytes": plain.peak_bytes,
                "budget_bytes": budget,
                "predicted_peak_bytes": plan.predicted_peak_bytes,
                **planned(plan, compiled(name, device, backend, way), expected, plain, repeats),
            }


def planned(
    plan: planner.Plan,
    workload: planner.Workload,
    expected: list[Tensor],
    plain: planner.results.Measurement,
    repeats: int,
) -> dict[str, Any]:
    """What a plan was measured to do to a compiled model."""
    with planner.apply(workload.model, plan):
        found = gradients_of(workload)
        workload.zero_grad()
        measured = planner.measure(workload, repeats=repeats)
    apart = difference(expected, found)
    return {
        "measured_peak_bytes": measured.peak_bytes,
        "over_budget": measured.peak_bytes > plan.budget_bytes,
        "gradients": "equal" if apart == 0 else f"within {apart:.1g}",
        "predicted_slowdown": plan.slowdown,
        "measured_slowdown": measured.seconds / plain.seconds,
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """What the table says about the promises."""
    own = [row for row in rows if row["profile"] == "compiled"]
    others = [row for row in rows if row["profile"] != "compiled"]
    error = max((abs(row["predicted_peak_bytes"] - row["measured_peak_bytes"]) for row in own), default=0)
    return [
        f"profile compiled, of the model as it runs: {len(own)} plans, {_over(own)} above the budget; largest "
        f"|predicted - measured| of the peak: {error} bytes",
        f"profile uncompiled, with a warning that the peak is not promised: {len(others)} plans, {_over(others)} above "
        "the budget",
        "unplanned_peak_bytes is of the compiled model; gradients are compared with it, relative to each parameter's "
        "largest; slowdowns too, of the whole step, medians, not in turns",
        "Inductor with fallback_random: its own random numbers depend on how the step is cut into graphs",
    ]


def _over(rows: list[dict[str, Any]]) -> int:
    return sum(row["over_budget"] for row in rows)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with torch._inductor.config.patch(fallback_random=True):
        rows = [
            row
            for name in options.models
            for backend in options.backends
            for way in options.ways
            for row in rows_of(name, options.device, backend, way, options.repeats)
        ]
    name = result_name("compiled", options.device)
    write_result(options.out, name, "Plans under torch.compile", pd.DataFrame(rows), summary(rows))


if __name__ == "__main__":
    main()
