"""Plans on several ranks: losses, gradients and measured peaks of DistributedDataParallel and fully_shard."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import planner
from benchmarks.budgets import even_budgets
from benchmarks.distributed_engines import ENGINES, SIZES, STEPS, Engine, Training, training, workload_of
from benchmarks.outside_meter import OutsideMeter
from benchmarks.rank_processes import values_of_ranks
from benchmarks.reporting import RESULTS, write_result

BUDGETS = 6
GROUP_SECONDS = 60.0
VARIED = "gpt2"  # the model that is trained with other settings of the engine as well


def on_rank(rank: int, model: str, kind: str, settings: str, budgets: int) -> list[dict[str, Any]]:
    """What one rank measures: a dict for each budget, from the unplanned peak to the smallest one."""
    engine = ENGINES[kind][settings]
    train = training(model, engine)
    profile = planner.profile(workload_of(train, engine))
    del train
    solving: dict[str, Any] = {"reshard": "solve"} if settings.startswith("reshard=") else {}
    unplanned, seen = trained(model, engine, None)
    rows = []
    for budget in even_budgets(profile, budgets, **solving):
        plan = planner.solve(profile, budget, **solving)
        measured_bytes, got = trained(model, engine, plan)
        rows.append(
            {
                "budget_bytes": budget,
                "predicted_bytes": plan.predicted_peak_bytes,
                "unplanned_bytes": unplanned,
                "measured_bytes": measured_bytes,
                "equal": got == seen,
                "fingerprint": plan.fingerprint,
                "said": "; ".join(plan.unsteady),
            }
        )
    return rows


def trained(model: str, engine: Engine, plan: planner.Plan | None) -> tuple[int, list[tuple[float, str]]]:
    """A few steps of a new model: the peak of all of them by the outside meter, and what each step gave."""
    gc.collect()
    with OutsideMeter() as meter:
        train: Training = training(model, engine)
        handle = None if plan is None else planner.apply(train.model, plan)
        meter.begin()
        engine.loop(train, STEPS)
        if handle is not None:
            handle.remove()
    return meter.peak_bytes, train.seen


def row_of(said: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks say of one budget as a row of the table."""
    first, peaks = said[0], [each["measured_bytes"] for each in said]
    return {
        "budget_bytes": first["budget_bytes"],
        "predicted_bytes": first["predicted_bytes"],
        "unplanned_of_ranks": " ".join(str(each["unplanned_bytes"]) for each in said),
        "measured_bytes": max(peaks),
        "measured_of_ranks": " ".join(map(str, peaks)),
        "ranks_differ_percent": 100 * (max(peaks) - min(peaks)) / max(peaks),
        "error_percent": 100 * (first["predicted_bytes"] - max(peaks)) / max(peaks),
        "within": max(peaks) <= first["budget_bytes"],
        "equal": all(each["equal"] for each in said),
        "one_plan": len({each["fingerprint"] for each in said}) == 1,
        "said": first["said"],
    }


def rows(models: list[str], kind: str, ranks: int, budgets: int) -> Iterator[dict[str, Any]]:
    """All rows, told as they come."""
    for model in models:
        for settings in ENGINES[kind] if model == VARIED else [""]:
            said = values_of_ranks(
                on_rank, model, kind, settings, budgets, ranks=ranks, group_seconds=GROUP_SECONDS, limit_seconds=600.0
            )
            for of_budget in zip(*said, strict=True):
                row = {"model": model, "engine": kind, "settings": settings, "ranks": ranks, **row_of(list(of_budget))}
                print({key: row[key] for key in row if key != "said"}, flush=True)
                yield row


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=list(ENGINES), required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--budgets", type=int, default=BUDGETS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    frame = pd.DataFrame(rows(options.models, options.engine, options.ranks, options.budgets))
    suffix = "" if options.ranks == 2 else f"-{options.ranks}"
    write_result(options.out, f"distributed-{options.engine}{suffix}", "Plans on several ranks", frame, summary(frame))


def summary(frame: pd.DataFrame) -> list[str]:
    """What the table says about the promises."""
    return [
        f"{len(frame)} plans, each over {STEPS} steps of a new model, the first one included: {(~frame.within).sum()} "
        f"above the budget on a rank, {(~frame.equal).sum()} with a loss or a gradient that is not bit for bit the "
        f"unplanned run's, {(~frame.one_plan).sum()} not the same on all ranks; predicted within "
        f"{frame.error_percent.abs().max():.3f} % of the worst rank's peak, {(frame.error_percent < 0).sum()} below it",
        f"ranks differ by up to {frame.ranks_differ_percent.max():.3f} % of the peak of a step that all take alike, "
        "and so do runs without a plan: gloo's threads let go of a reduced buffer earlier or later. Predictions count "
        "it as long as it may be there",
        "measured: every byte of each process's tensors, from before the model is made, by the allocator's events; one "
        "thread on each rank",
    ]


if __name__ == "__main__":
    main()
