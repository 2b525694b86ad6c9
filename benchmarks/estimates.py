"""Estimates against measurements: steps and plans of a device that was not there, run on the device itself.

``peaks``: the models of the zoo and families of transformers on the CPU, unplanned and under two plans that were solved
from the estimate. ``cards``: unplanned peaks that a GPU had, from the tables of earlier runs, estimated without one.
``seconds``: steps of the zoo's models and of plans for them, estimated from a file that was calibrated just before.
Machines that others share change their speed meanwhile: the steps that the calibration times are timed again beside
each model, and its seconds are divided by how much longer these take now (``machine_factor``).
"""

from __future__ import annotations

import argparse
import csv
import functools
import gc
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import planner
from benchmarks import catalogue
from benchmarks.budgets import smallest_budget
from benchmarks.catalogue_families import FAMILIES
from benchmarks.fidelity import GPU_SETTINGS
from benchmarks.interleaving import in_turns
from benchmarks.reporting import RESULTS, result_name, write_rows
from planner.zoo import build, names
from profiler.device_record import DeviceRecord, OpRate
from profiler.measurement.calibration import calibrate, steps_to_time
from profiler.measurement.meter import metered, time_meter
from profiler.workload.workload import own_loss

# Of the way from the smallest budget to the unplanned peak.
DEPTHS = (0.2, 0.7)
TIMED_DEPTHS, ROUNDS = (0.1, 0.4, 0.7), 5
_NO_OFFLOAD = planner.Offload(mode="never")
GPU_RESULTS = RESULTS.with_name("results-gpu")
_MOST_PERCENT, _LEAST_PERCENT = 3.0, -0.5
A_CPU = DeviceRecord(
    name="a CPU",
    kind="cpu",
    memory_bytes=2**34,
    origin="data sheet",
    rates=(
        OpRate(kind="matmul", per_second=4e10, launch_seconds=8e-6, source="assumed"),
        OpRate(kind="memory", per_second=5e9, launch_seconds=5e-6, source="assumed"),
    ),
)


def family_workload(name: str) -> planner.Workload:
    """A tiny model of a family of transformers, as the catalogue trains it."""
    family = FAMILIES[name]
    model, batch = catalogue._built(family, "cpu")
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return planner.Workload(model=model, inputs=batch, loss=family.loss or own_loss, optimizer=optimizer)


def builder(name: str, settings: dict[str, Any] | None = None) -> Callable[[], planner.Workload]:
    """What builds a model of the zoo, or of a family of transformers."""
    if name in FAMILIES:
        return lambda: family_workload(name)
    return lambda: build(name, **(settings or {}))


def peaks_of(name: str) -> Iterator[dict[str, Any]]:
    """Rows of one model: its step without a plan, and under plans from the estimate, estimated and measured."""
    make = builder(name)
    estimated = planner.estimate(make, device=A_CPU, menus=name not in FAMILIES)
    least = smallest_budget(estimated, offload=_NO_OFFLOAD)
    span = estimated.unplanned_peak_bytes - least
    budgets = [least + int(depth * span) for depth in DEPTHS]
    plans = [planner.solve(estimated, budget, offload="never") for budget in budgets]
    real = make()
    measured = planner.measure(real, repeats=1).peak_bytes
    yield _row(name, "unplanned", estimated.unplanned_peak_bytes, measured)
    for depth, plan in zip(DEPTHS, plans, strict=True):
        with planner.apply(real.model, plan):
            measured = planner.measure(real, repeats=1).peak_bytes
        yield _row(name, f"{depth:.0%} of the range", plan.predicted_peak_bytes, measured)


def _row(name: str, plan: str, estimated: int, measured: int, margin: int = 0) -> dict[str, Any]:
    return {
        "model": name,
        "plan": plan,
        "estimated_bytes": estimated,
        "measured_bytes": measured,
        "difference_bytes": estimated - measured,
        "percent": round(100 * (estimated / measured - 1), 4),
        "margin_bytes": margin,
        "failed": "",
    }


def cards_of(case: tuple[str, str, dict[str, Any], int]) -> Iterator[dict[str, Any]]:
    """The row of one model whose unplanned peak a GPU had."""
    name, source, settings, measured = case
    estimated = planner.estimate(builder(name, settings), device="h200", menus=False)
    assert estimated.estimate is not None
    margin = estimated.estimate.margin_bytes
    yield _row(name, source, estimated.unplanned_peak_bytes, measured, margin)


def recorded() -> list[tuple[str, str, dict[str, Any], int]]:
    """Models, the tables that have their unplanned peak on a GPU, their settings and that peak."""
    found = []
    for name in ("gpt2", "unet", "resnet50", "vit"):
        rows = _table(f"loops-{name}-cuda")
        peak = next(int(row["unplanned_bytes"]) for row in rows if row["loop"] == "Output bound, zero_grad last")
        found.append((name, f"loops-{name}-cuda", {}, peak))
    for name in ("gpt2", "unet"):
        peak = max(int(row["measured_peak_bytes"]) for row in _table(f"fidelity-{name}-cuda"))
        found.append((name, f"fidelity-{name}-cuda", GPU_SETTINGS[name], peak))
    peaks = {row["model"]: int(float(row["unplanned_peak_bytes"] or 0)) for row in _table("catalogue-cuda")}
    found += [(name, "catalogue-cuda", {}, peak) for name, peak in peaks.items() if peak]
    return found


def _table(name: str) -> list[dict[str, str]]:
    with open(GPU_RESULTS / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def machine_seconds(device: str) -> float:
    """How long the steps take that a calibration times."""
    total = 0.0
    for workload in steps_to_time(torch.device(device)):
        took = [metered(time_meter(workload.device), workload.step).seconds for _ in range(ROUNDS)]
        total += statistics.median(took[1:])
    return total


class Timed(NamedTuple):
    """A model to time, the device that it is on and its file, and how long the calibration's steps took there."""

    name: str
    device: str
    file: str
    calibrated_seconds: float


def seconds_of(case: Timed) -> Iterator[dict[str, Any]]:
    """Rows of one model: seconds of its plain step and of plans, from an estimate and from a measured profile."""
    name = case.name
    make = builder(name, {"device": case.device, **(GPU_SETTINGS.get(name, {}) if case.device == "cuda" else {})})
    estimated, real = planner.estimate(make, device=case.file), make()
    profile = planner.profile(real)
    least = max(smallest_budget(estimated, offload=_NO_OFFLOAD), smallest_budget(profile, offload=_NO_OFFLOAD))
    span = profile.unplanned_peak_bytes - least
    budgets = [least + int(depth * span) for depth in TIMED_DEPTHS]
    plans = [planner.solve(source, budget) for budget in budgets for source in (estimated, profile)]
    before_seconds = machine_seconds(case.device)
    plain, planned = in_turns(real, plans, rounds=ROUNDS)
    factor = (before_seconds + machine_seconds(case.device)) / 2 / case.calibrated_seconds

    def row(plan: str, estimated_seconds: float, measured_seconds: float) -> dict[str, Any]:
        off = estimated_seconds / (measured_seconds / factor) - 1
        return {
            "model": name,
            "plan": plan,
            "estimated_seconds": estimated_seconds,
            "measured_seconds": measured_seconds,
            "machine_factor": round(factor, 3),
            "off_percent": round(100 * off, 2),
            "failed": "",
        }

    yield row("unplanned", estimated.unplanned_seconds, statistics.median(plain))
    for number, depth in enumerate(TIMED_DEPTHS):
        plan, ours, theirs = plans[2 * number], planned[2 * number], planned[2 * number + 1]
        against = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        found = row(f"{depth:.0%} of the range", plan.predicted_seconds, statistics.median(ours))
        yield {**found, "against_measured_plan": round(against, 4)}


def seconds_summary(rows: list[dict[str, Any]]) -> list[str]:
    """How far off seconds are, how plans of estimates compare with those of profiles, and their order by time."""
    good = [row for row in rows if not row["failed"]]
    off = sorted(abs(row["off_percent"]) for row in good)
    against = [row["against_measured_plan"] for row in good if "against_measured_plan" in row]
    pairs = [
        (left["estimated_seconds"] - right["estimated_seconds"])
        * (left["measured_seconds"] - right["measured_seconds"])
        for left, right in itertools.combinations(good, 2)
        if left["model"] == right["model"]
    ]
    return [
        f"seconds off: median {statistics.median(off):.1f} %, most {off[-1]:.1f} %; failed: {len(rows) - len(good)}",
        f"plans from the estimate against plans from a measured profile: {sum(each <= 1.03 for each in against)} of "
        f"{len(against)} at most 3 % slower, median {statistics.median(against):.3f}, most {max(against):.3f}"
        if against
        else "no plans",
        f"pairs of steps of a model in the right order by time: {sum(each >= 0 for each in pairs)} of {len(pairs)}",
    ]


def or_error(rows: Callable[[Any], Iterator[dict[str, Any]]], case: Any) -> list[dict[str, Any]]:
    """The rows of a model; one that fails has the error in its row."""
    try:
        return list(rows(case))
    except Exception as error:  # noqa: BLE001  (what fails is a row)
        name = case if isinstance(case, str) else case[0]
        return [{"model": name, "failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}]
    finally:
        gc.collect()
        gc.freeze()


def rows_in_order(
    rows: Callable[[Any], Iterator[dict[str, Any]]], cases: Sequence[Any], jobs: int
) -> Iterator[dict[str, Any]]:
    """The rows of all cases in order, from so many processes."""
    found = functools.partial(or_error, rows)
    if jobs == 1:
        yield from itertools.chain.from_iterable(map(found, cases))
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), catalogue.begin, ("cpu",)) as pool:
        yield from itertools.chain.from_iterable(pool.map(found, cases))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """How far off the estimates are."""
    good = [row for row in rows if not row["failed"]]
    off = [abs(row["percent"]) for row in good]
    low = [r for r in good if r["percent"] < _LEAST_PERCENT and r["difference_bytes"] < -r["margin_bytes"]]
    equal = sum(row["difference_bytes"] == 0 for row in good)
    return [
        f"models: {len({row['model'] for row in rows})}; rows: {len(good)}; failed: {len(rows) - len(good)}",
        f"equal to the byte: {equal}; within 0.1 %: {sum(each <= 0.1 for each in off)}; within 1 %: "
        f"{sum(each <= 1 for each in off)}; beyond {_MOST_PERCENT:g} %: {sum(each > _MOST_PERCENT for each in off)}; "
        f"more than {-_LEAST_PERCENT:g} % and the stated margin too low: {len(low)}",
    ]


PARTS = {
    "peaks": "Estimated against measured peaks on the CPU",
    "cards": "Estimated against a GPU's recorded peaks",
    "seconds": "Estimated against measured seconds",
}


def main() -> None:
    """Estimate, measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--models", nargs="+", help="these alone")
    parser.add_argument("--device", default="cpu", help="for seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == "cpu":
        catalogue.begin("cpu")
    rows_of = {"peaks": peaks_of, "cards": cards_of, "seconds": seconds_of}
    for part in options.part:
        cases: list[Any] = recorded() if part == "cards" else [*names(), *(FAMILIES if part == "peaks" else ())]
        cases = [c for c in cases if not options.models or (c if isinstance(c, str) else c[0]) in options.models]
        if part == "seconds":
            file = options.out / f"{result_name('estimates-device', options.device)}.json"
            calibrate(options.device).save(file)
            took = machine_seconds(options.device)
            cases = [Timed(name, options.device, str(file), took) for name in cases]
        rows = rows_in_order(rows_of[part], cases, 1 if part == "seconds" else options.jobs)
        notes = seconds_summary if part == "seconds" else summary
        write_rows(options.out, result_name(f"estimates-{part}", options.device), PARTS[part], rows, notes)


if __name__ == "__main__":
    main()
