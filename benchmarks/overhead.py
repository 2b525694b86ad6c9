"""Overhead: what a plan costs that recomputes nothing, and what profiling costs in plain steps."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pandas as pd

import planner
from benchmarks.fidelity import MODELS
from benchmarks.interleaving import interleaved
from benchmarks.reporting import RESULTS, result_name, write_result
from planner.zoo import build


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for name in MODELS:
        workload = build(name, device=options.device)
        workload.step()
        profile_seconds = []
        for menus in (False, True):
            begin = time.perf_counter()
            profile = planner.profile(workload, menus=menus)
            profile_seconds.append(time.perf_counter() - begin)
        plan = planner.solve(profile, profile.unplanned_peak_bytes)
        times = interleaved(workload, plan, options.rounds)
        rows.append(
            {
                "model": name,
                "recomputed_ops": plan.recomputed_ops,
                "planned_over_plain": times.ratio,
                "plain_seconds": times.plain_seconds,
                "profile_in_plain_steps": profile_seconds[0] / times.plain_seconds,
                "with_menus_in_plain_steps": profile_seconds[1] / times.plain_seconds,
            }
        )
    notes = ["budget: the unplanned peak; planned_over_plain: median of pairs in turn"]
    write_result(
        options.out,
        result_name("overhead", options.device),
        "Overhead of a plan that keeps everything",
        pd.DataFrame(rows),
        notes,
    )


if __name__ == "__main__":
    main()
