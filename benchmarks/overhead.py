"""Overhead: what a plan costs that recomputes nothing, and what profiling costs in plain steps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import planner
from benchmarks.fidelity import MODELS
from benchmarks.interleaving import interleaved
from benchmarks.reporting import RESULTS, result_name, write_rows
from planner.zoo import build


def rows_of(models: Iterable[str], device: str, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each model."""
    for name in models:
        workload = build(name, device=device)
        workload.step()
        profile_seconds = []
        for menus in (False, True):
            begin = time.perf_counter()
            profile = planner.profile(workload, menus=menus)
            profile_seconds.append(time.perf_counter() - begin)
        plan = planner.solve(profile, profile.unplanned_peak_bytes)
        times = interleaved(workload, plan, rounds)
        yield {
            "model": name,
            "recomputed_ops": plan.recomputed_ops,
            "planned_over_plain": times.ratio,
            "plain_seconds": times.plain_seconds,
            "profile_in_plain_steps": profile_seconds[0] / times.plain_seconds,
            "with_menus_in_plain_steps": profile_seconds[1] / times.plain_seconds,
        }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    notes = ["budget: the unplanned peak; planned_over_plain: median of pairs in turn"]
    rows = rows_of(MODELS, options.device, options.rounds)
    name, title = result_name("overhead", options.device), "Overhead of a plan that keeps everything"
    write_rows(options.out, name, title, rows, lambda _: notes)


if __name__ == "__main__":
    main()
