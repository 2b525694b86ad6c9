"""Advice held to its word: the combinations that it names, built for real, and their measured peaks and seconds."""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

import planner
from benchmarks.one_step import peak_bytes_of
from benchmarks.reporting import RESULTS, result_name, write_result
from planner.capacity.levers import Combination, optimizer_named
from planner.capacity.workload_variants import WorkloadVariants
from planner.plans.offload_request import Offload
from planner.units import parse_bytes
from profiler.measurement.meter import metered, time_meter
from profiler.workload.snapshot import preserved
from profiler.workload.workload import varied

MODELS: dict[str, dict[str, Any]] = {"gpt2": {"layers": 6}, "resnet50": {"batch": 16}}
BUDGETS = ("70%", "45%")
REPEATS = 3


class Real(NamedTuple):
    """What an effective batch really took.

    Attributes:
        first_peak_bytes: of the step in which the optimizer makes its states.
        peak_bytes: of a later one.
        seconds: median of a few.
    """

    first_peak_bytes: int
    peak_bytes: int
    seconds: float


def realised(variants: WorkloadVariants, each: Combination) -> planner.Workload:
    """The workload of one micro-batch with all levers of a combination but its plan."""
    work = variants.built(each.precision, each.micro_batches)
    if not each.optimizer:
        return work
    return varied(work, optimizer=optimizer_named(each.optimizer, list(work.model.parameters())))


def measured(variants: WorkloadVariants, each: Combination) -> Real:
    """Build a combination and run effective batches: every micro-batch, then the optimizer's step."""
    work = realised(variants, each)

    def effective() -> None:
        work.zero_grad()
        for part in reversed(range(each.micro_batches)):
            loss = work.forward()
            work.backward(loss)
            value = loss.detach()  # As Workload.step: the loss outlives its graph.
            del loss
            if part:
                del value
        work.update()

    with preserved(work), contextlib.nullcontext() if each.plan is None else planner.apply(work.model, each.plan):
        work.zero_grad()
        first, later = peak_bytes_of(work, effective), peak_bytes_of(work, effective)
        times = [metered(time_meter(work.device), effective).seconds for _ in range(REPEATS)]
    return Real(first, later, statistics.median(times))


def rows_of(name: str, device: str, link_gbps: float | None, menus: bool) -> Iterator[dict[str, Any]]:
    """The advised combination, the fastest one, and every lever alone, for each budget."""
    settings = MODELS[name]
    offload_request = Offload(link_gbps=link_gbps) if link_gbps else Offload(mode="never")
    whole = 0
    for budget in BUDGETS:
        size = parse_bytes(budget, whole_bytes=whole) if whole else budget
        advice = planner.advise(
            f"zoo:{name}", size, settings=settings, device=device, offload=offload_request, menus=menus
        )
        whole = advice.unplanned.peak_bytes
        variants = WorkloadVariants(f"zoo:{name}", settings, "batch", device, menus, None)
        plain = measured(variants, advice.unplanned)
        for what, each in _chosen(advice):
            real = measured(variants, each)
            yield {
                "model": name,
                "budget_bytes": advice.budget_bytes,
                "which": what,
                "levers": each.title,
                "same_result": each.result,
                "predicted_peak_bytes": each.peak_bytes,
                "measured_peak_bytes": real.peak_bytes,
                "first_step_peak_bytes": real.first_peak_bytes,
                "over_budget": each.fits and max(real.peak_bytes, real.first_peak_bytes) > advice.budget_bytes,
                "predicted_ratio": (each.seconds or 0.0) / (advice.unplanned.seconds or 1.0),
                "measured_ratio": real.seconds / plain.seconds,
            }


def _chosen(advice: planner.results.Advice) -> Iterator[tuple[str, Combination]]:
    """The two that are recommended, and every lever alone whose seconds are known."""
    if advice.exact is not None:
        yield "same result", advice.exact
    if advice.cheapest is not None:
        yield "fastest", advice.cheapest
    for each in advice.alone():
        if each.seconds is not None:
            yield "alone", each


def summary(frame: pd.DataFrame) -> list[str]:
    """What the table says about the promises."""
    pairs = list(zip(map(int, frame["predicted_peak_bytes"]), map(int, frame["measured_peak_bytes"]), strict=True))
    equal = sum(predicted == real for predicted, real in pairs)
    largest = max(abs(predicted - real) for predicted, real in pairs)
    over = sum(map(bool, frame["over_budget"]))
    return [
        f"combinations measured: {len(frame)}; peaks equal to the byte: {equal}; largest difference: "
        f"{largest} bytes; above the budget that they were said to fit: {over}",
        "ratios are seconds of an effective batch over those of the step as it is; other programs used the cores",
    ]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--link-gbps", type=float)
    parser.add_argument("--no-menus", action="store_true", help="plans of whole stages; takes a quarter of the time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    asked = (options.device, options.link_gbps, not options.no_menus)
    rows = [row for name in options.models for row in rows_of(name, *asked)]
    frame = pd.DataFrame(rows)
    name = result_name("advise", options.device)
    write_result(options.out, name, "Advice: predicted against measured", frame, summary(frame))


if __name__ == "__main__":
    main()
