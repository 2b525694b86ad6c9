"""One simulated rank against real ones: its predicted peaks, and what the worst of 2 or 4 gloo ranks really takes."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import planner
from benchmarks.outside_meter import OutsideMeter
from benchmarks.rank_processes import values_of_ranks
from benchmarks.reporting import RESULTS, write_result
from planner import zoo
from planner.capacity.rank_advice import RankAdvice, advise_rank
from planner.distributed.sharding import ENGINES, Engine, sharded
from planner.plans.offload_request import Offload
from planner.plans.solving import quick_plan

STEPS = 3
GROUP_SECONDS = 60.0
# Small enough for several ranks on two cores. Rows of the second one's weights are not divided evenly.
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 4, "hidden": 64, "heads": 2, "seq": 64, "vocab": 200, "batch": 4},
    "mlp": {"layers": 6, "hidden": 131, "batch": 256},
    "llama": {"layers": 4, "hidden": 64, "heads": 2, "seq": 64, "vocab": 200, "batch": 4},
    "resnet50": {"hidden": 8, "image": 32, "batch": 8},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on ranks, and what one that is simulated says of it.

    Attributes:
        model: of the zoo.
        engine: that wraps it.
        advice: without a budget.
        plan: half way from the smallest peak to the unplanned one.
    """

    model: str
    engine: Engine
    advice: RankAdvice
    plan: planner.Plan


def simulated(model: str, engine: Engine, ranks: int) -> Case:
    """Says what a rank would take, without and with a plan."""
    settings = SIZES[model]
    advice = advise_rank(f"zoo:{model}", world_size=ranks, shard=engine, settings=settings, menus=False)
    budget_bytes = (advice.minimum_budget_bytes + advice.profile.unplanned_peak_bytes) // 2
    plan = quick_plan(advice.profile, budget_bytes, Offload(mode="never"))
    return Case(model=model, engine=engine, advice=advice, plan=plan)


def on_rank(rank: int, plans: dict[tuple[str, Engine], planner.Plan]) -> list[tuple[int, int]]:
    """Peaks of one rank in each case, without and with the plan."""
    return [(trained(*case, None), trained(*case, plan)) for case, plan in plans.items()]


def trained(model: str, engine: Engine, plan: planner.Plan | None) -> int:
    """The peak of a few steps of a new model, from before it is made, by the outside meter."""
    gc.collect()
    with OutsideMeter() as meter:
        workload = sharded(zoo.build(model, **SIZES[model]), engine)
        handle = None if plan is None else planner.apply(workload.model, plan)
        meter.begin()
        output = loss = None  # They stay until those of the next step, as in most loops.
        for _ in range(STEPS):
            workload.optimizer.zero_grad()
            given = workload.inputs
            output = workload.model(**given) if isinstance(given, dict) else workload.model(given)
            loss = output.loss if workload.loss is None else workload.loss(output)
            loss.backward()
            workload.optimizer.step()
        if handle is not None:
            handle.remove()
        del output, loss
    return meter.peak_bytes


def rows(models: list[str], ranks: int) -> Iterator[dict[str, Any]]:
    """All rows of so many ranks."""
    cases = [simulated(model, engine, ranks) for model in models for engine in ENGINES]
    plans = {(case.model, case.engine): case.plan for case in cases}
    measured = values_of_ranks(on_rank, plans, ranks=ranks, group_seconds=GROUP_SECONDS, limit_seconds=1200.0)
    for case, peaks in zip(cases, zip(*measured, strict=True), strict=True):
        advice = case.advice
        unplanned, planned = (max(peaks_of) for peaks_of in zip(*peaks, strict=True))
        row = {
            "model": case.model,
            "engine": case.engine,
            "ranks": ranks,
            "resident_bytes": advice.profile.resident.total,
            "simulated_bytes": advice.profile.unplanned_peak_bytes,
            "measured_bytes": unplanned,
            "difference_percent": _difference(advice.profile.unplanned_peak_bytes, unplanned),
            "budget_bytes": case.plan.budget_bytes,
            "planned_bytes": case.plan.predicted_peak_bytes,
            "planned_measured_bytes": planned,
            "planned_difference_percent": _difference(case.plan.predicted_peak_bytes, planned),
            "copy_bytes": 0 if case.engine == "ddp" else max(advice.kept_gathered_bytes, advice.gathered_bytes // 2),
        }
        print(row, flush=True)
        yield row


def _difference(predicted: int, measured: int) -> float:
    return 100 * (predicted - measured) / measured


def summary(frame: pd.DataFrame) -> list[str]:
    """What the table says."""
    exact = frame.simulated_bytes == frame.measured_bytes
    above = frame.planned_measured_bytes > frame.budget_bytes
    return [
        f"{exact.sum()} of {len(frame)} unplanned peaks equal to the byte, the others within "
        f"{frame.difference_percent.abs().max():.3f} %; with a plan that was solved for on the simulated rank and "
        f"applied on the real ones, {above.sum()} above its budget, predicted within "
        f"{frame.planned_difference_percent.abs().max():.3f} %",
        "simulated: one process, torch's fake process group, the first rank; a profile of the step, and a plan on it "
        "half way from the smallest peak to the unplanned one",
        f"measured: the worst rank's peak of {STEPS} steps of a loop of its own, the first one included: every byte of "
        "each process's tensors, from before the model is made, by the allocator's events; one thread on each rank",
        "copy_bytes: of the largest copy that gloo makes of a unit's gradients under fully_shard. Predictions have it; "
        "gloo's threads let go of it at once, late, or where they are held up later than the next gather, so that a "
        "peak varies by as much from run to run",
    ]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    frame = pd.DataFrame(row for ranks in options.ranks for row in rows(options.models, ranks))
    write_result(options.out, "simulated-ranks", "One simulated rank against real ones", frame, summary(frame))


if __name__ == "__main__":
    main()
