"""Dynamic shapes: batches of eight lengths under one budget, beside the single plan for the largest."""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd

import planner
from benchmarks.one_step import peak_bytes_of
from benchmarks.reporting import MIB, RESULTS, result_name, write_result
from planner.training.dynamic_shapes import DynamicHandle
from planner.training.plan_cache import without_shapes
from planner.zoo import build
from profiler.workload.workload import Workload

LENGTHS = (64, 80, 96, 128, 160, 192, 224, 256)
PROFILED = (64, 160, 256)
SHARE = 0.6  # of the unplanned peak of the longest batch


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    longest = build("gpt2", layers=6, batch=4, seq=LENGTHS[-1], device=options.device, optimizer="none")
    plain, single = copy.deepcopy(longest.model), copy.deepcopy(longest.model)
    inputs: Any = longest.inputs
    batches = {length: {key: value[:, :length].contiguous() for key, value in inputs.items()} for length in LENGTHS}
    unplanned = planner.measure(Workload(model=plain, inputs=batches[LENGTHS[-1]]), repeats=1)
    budget_bytes = int(SHARE * unplanned.peak_bytes)

    planner.auto_checkpoint(
        longest.model,
        batches[PROFILED[-1]],
        budget=budget_bytes,
        dynamic=True,
        sizes=[batches[length] for length in PROFILED[:-1]],
    )
    handle = planner.handle_of(longest.model)
    assert isinstance(handle, DynamicHandle)
    planner.apply(single, without_shapes(handle.plan))

    models = {"plain": plain, "dynamic": longest.model, "single": single}
    first = {length: _first_peak(Workload(model=longest.model, inputs=batches[length])) for length in LENGTHS}
    handle.wait()
    chosen_first = handle.choosing_seconds
    seconds = _seconds(models, batches, options.steps)
    choosing = (handle.choosing_seconds - chosen_first) / options.steps
    rows = [_row(length, handle, longest.model, batches[length], first[length], seconds) for length in LENGTHS]
    write_result(
        options.out,
        result_name("dynamic", options.device),
        "Batches of changing lengths: a plan per length, and the single plan for the longest",
        pd.DataFrame(rows),
        _notes(handle, budget_bytes, chosen_first, choosing, seconds),
    )
    handle.remove()


def _first_peak(workload: Workload) -> int:
    """Of the first step of a signature, under its safe plan unless it was profiled."""
    workload.zero_grad()
    peak_bytes = peak_bytes_of(workload)
    workload.zero_grad()
    return peak_bytes


def _seconds(models: dict[str, Any], batches: dict[int, Any], steps: int) -> dict[str, dict[int, list[float]]]:
    """Seconds of every step of one sequence, the models in turn."""
    order = random.Random(0)
    seconds: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in models}
    for _ in range(steps):
        length = order.choice(LENGTHS)
        for name in order.sample(list(models), len(models)):
            workload = Workload(model=models[name], inputs=batches[length])
            begin = time.perf_counter()
            workload.step()
            seconds[name][length].append(time.perf_counter() - begin)
            workload.zero_grad()
    return seconds


def _row(
    length: int,
    handle: DynamicHandle,
    model: Any,
    batch: Any,
    first_peak_bytes: int,
    seconds: dict[str, dict[int, list[float]]],
) -> dict[str, Any]:
    key = handle.signature_of(**batch)
    plan = handle.plans[key]
    peak_bytes = planner.measure(Workload(model=model, inputs=batch), repeats=1).peak_bytes
    times = {name: statistics.median(own[length]) if own[length] else float("nan") for name, own in seconds.items()}
    return {
        "length": length,
        "plan": handle.statuses[key],
        "first_peak_MiB": first_peak_bytes / MIB,
        "peak_MiB": peak_bytes / MIB,
        "predicted_MiB": plan.predicted_peak_bytes / MIB,
        "budget_MiB": plan.budget_bytes / MIB,
        "recomputed_ops": plan.recomputed_ops,
        "plain_ms": times["plain"] * 1e3,
        "slowdown": times["dynamic"] / times["plain"],
        "slowdown_single": times["single"] / times["plain"],
    }


def _notes(
    handle: DynamicHandle,
    budget_bytes: int,
    first_seconds: float,
    later_seconds: float,
    seconds: dict[str, dict[int, list[float]]],
) -> list[str]:
    total = {name: sum(sum(own) for own in by_length.values()) for name, by_length in seconds.items()}
    return [
        f"gpt2, 6 layers, batch 4, no optimizer; budget {budget_bytes} bytes, {SHARE:.0%} of the longest batch's "
        f"unplanned peak; profiled at {', '.join(map(str, PROFILED))}",
        "first_peak: of the first step of a length, under its safe plan unless profiled; peak: under its own plan",
        "slowdown: median step beside the unplanned model's, in turn; single: every batch under the longest one's plan",
        f"one sequence in turn: {total['plain']:.2f} s unplanned, {total['dynamic']:.2f} s with a plan per length, "
        f"{total['single']:.2f} s with the single plan",
        f"solves: {handle.solves} for {len(handle.plans)} signatures, {len(PROFILED)} of them at the start",
        f"time that training waited for plans: {first_seconds * 1e3:.1f} ms in the first steps of all lengths, "
        f"{later_seconds * 1e3:.3f} ms a step later",
    ]


if __name__ == "__main__":
    main()
