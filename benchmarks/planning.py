"""How long planning takes: the profile and the plan of GPTs of 12 and of 48 blocks, in plain steps."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import planner
from benchmarks.reporting import RESULTS, write_rows
from planner.zoo import build
from profiler.workload.workload import Workload

LAYERS = (12, 48)
SHARE = 50  # of the unplanned peak
_SIZES = {"hidden": 128, "heads": 4, "seq": 128, "batch": 8, "vocab": 1000}


def step_seconds(work: Workload, repeats: int) -> float:
    """Median seconds of a step without a plan."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        work.step()
        seconds.append(time.perf_counter() - begin)
        work.zero_grad()
    return statistics.median(seconds[1:])


def rows_of(repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each number of blocks."""
    for layers in LAYERS:
        work = build("gpt2", layers=layers, **_SIZES)
        steps = [0]
        plain_seconds = step_seconds(work, repeats)

        def counted(what: str, done: int, total: int, steps: list[int] = steps) -> None:
            steps[0] = done + 1

        begin = time.perf_counter()
        profile = planner.profile(work, progress=counted)
        profiled = time.perf_counter()
        plan = planner.solve(profile, f"{SHARE}%")
        solved = time.perf_counter()
        kinds = {menu.graph for menu in profile.menus if menu.graph is not None}
        yield {
            "layers": layers,
            "kinds_captured": len(kinds),
            "runs": steps[0],
            "step_seconds": plain_seconds,
            "profile_seconds": profiled - begin,
            "profile_steps": (profiled - begin) / plain_seconds,
            "seconds_beside_15_steps": profiled - begin - 15 * plain_seconds,
            "solve_seconds": solved - profiled,
            "slowdown": plan.slowdown,
        }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    notes = [
        f"gpt2 of the zoo, width {_SIZES['hidden']}, {_SIZES['batch']} sequences of {_SIZES['seq']} tokens, one "
        f"thread; solved for {SHARE} % of the unplanned peak",
        "runs: steps and forwards that the profile runs; seconds beside 15 steps: what it takes beyond 15 plain steps",
    ]
    write_rows(options.out, "planning", "How long planning takes", rows_of(options.repeats), lambda _: notes)


if __name__ == "__main__":
    main()
