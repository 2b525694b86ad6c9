"""Overhead on several ranks: what a plan costs that keeps everything, under DistributedDataParallel and fully_shard."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch.distributed as dist

import planner
from benchmarks.distributed_engines import ENGINES, SIZES, Engine, Training, training, workload_of
from benchmarks.peer_turns import in_turns
from benchmarks.rank_processes import values_of_ranks
from benchmarks.reporting import RESULTS, write_result

# Steps of some tenths of a second on one core: those of the other benchmark are too short to be timed.
LARGER: dict[str, dict[str, int]] = {
    "gpt2": {**SIZES["gpt2"], "hidden": 192, "heads": 4, "seq": 128},
    "llama": {**SIZES["llama"], "hidden": 192, "heads": 4, "seq": 128},
    "resnet50": {"hidden": 32, "image": 64, "batch": 16},
}


def on_rank(rank: int, model: str, kind: str, rounds: int) -> dict[str, Any]:
    """Seconds of plain and of planned steps in turns, as medians over the rounds."""
    engine = ENGINES[kind][""]
    profile = planner.profile(workload_of(training(model, engine, LARGER), engine), menus=False)
    plan = planner.solve(profile, "100%")
    plain, planned = (training(model, engine, LARGER) for _ in range(2))
    with planner.apply(planned.model, plan):
        times = in_turns({"plain": step_of(engine, plain), "planned": step_of(engine, planned)}, rounds)
    return {
        "recomputed_ops": plan.recomputed_ops,
        "planned_over_plain": times.ratio("planned", "plain"),
        "plain_seconds": times.median("plain"),
    }


def step_of(engine: Engine, train: Training) -> Callable[[], float]:
    """One step, begun on all ranks at once; its seconds."""

    def step() -> float:
        dist.barrier()
        begin = time.perf_counter()
        engine.loop(train, 1)
        return time.perf_counter() - begin

    return step


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for kind in ENGINES:
        for model in LARGER:
            said = values_of_ranks(on_rank, model, kind, options.rounds, ranks=options.ranks, limit_seconds=600.0)
            slowest = max(said, key=lambda each: each["planned_over_plain"])
            rows.append({"model": model, "engine": kind, "ranks": options.ranks, **slowest})
            print(rows[-1], flush=True)
    notes = ["budget: the unplanned peak; planned_over_plain: median of pairs in turn, of the rank where it is larger"]
    title = "Overhead of a plan that keeps everything, on several ranks"
    write_result(options.out, "distributed-overhead", title, pd.DataFrame(rows), notes)


if __name__ == "__main__":
    main()
