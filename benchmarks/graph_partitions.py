"""Plans of single ops against torch's own partitions (``activation_memory_budget``), same backend, timed in turns."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import planner
from benchmarks.graph_fidelity import workload_of
from benchmarks.graph_stages import smallest_of
from benchmarks.one_step import seconds_of
from benchmarks.peer_methods import SOLVERS, compiled_peers, missing
from benchmarks.peer_turns import in_turns
from benchmarks.reporting import RESULTS, write_result
from planner.compiled.applying import Backend

MODELS = ("gpt2", "bert", "resnet50")
BUDGETS = (0.1, 0.5, 0.9)
THEIRS: dict[Backend, str] = {"eager": "aot_eager", "inductor": "inductor"}
EVERYTHING = "keeps everything"


def rows_of(
    name: str, backend: Backend, solvers: list[str], budgets: list[float], rounds: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """One row per partition: ours within its measured peak; and one that keeps everything beside the compiled step."""
    profile = planner.profile(workload_of(name), graph=True)
    smallest_bytes = smallest_of(profile, seconds)
    for peer in compiled_peers(THEIRS[backend], solvers, budgets):
        theirs = workload_of(name)
        with peer.installed(theirs):
            peak_bytes = planner.measure(theirs, repeats=1).peak_bytes
            head = {"model": name, "backend": backend, "partition": peer.setting or "as it is"}
            row = {**head, "peak_bytes": peak_bytes, "smallest_bytes": smallest_bytes}
            budgets_of_ours = {"same peak": peak_bytes}
            if not peer.setting:
                budgets_of_ours[EVERYTHING] = 2 * profile.unplanned_peak_bytes
            for ours, budget_bytes in budgets_of_ours.items():
                yield {**row, "ours": ours, **against(theirs, name, profile, budget_bytes, backend, rounds, seconds)}


def against(
    theirs: planner.Workload,
    name: str,
    profile: planner.GraphProfile,
    budget_bytes: int,
    backend: Backend,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """Our peak within the budget, and our seconds over theirs."""
    ours = workload_of(name)
    try:
        plan = planner.solve(profile, budget_bytes, time_limit_seconds=seconds)
        if backend != "eager":
            plan = planner.verify(ours, plan, backend=backend, profile=profile, time_limit_seconds=seconds).plan
    except (planner.Infeasible, planner.NothingFound):
        return {"our_peak_bytes": math.nan, "recomputed_ops": math.nan, "ours_over_theirs": math.nan}
    with planner.apply(ours.model, plan, backend=backend):
        peak_bytes = planner.measure(ours, repeats=1).peak_bytes
        times = in_turns({"theirs": lambda: seconds_of(theirs), "ours": lambda: seconds_of(ours)}, rounds)
    return {
        "our_peak_bytes": peak_bytes,
        "recomputed_ops": plan.recomputed_ops,
        "ours_over_theirs": times.ratio("ours", "theirs"),
    }


def summary(rows: list[dict[str, Any]], solvers: list[str]) -> list[str]:
    """What the table says."""
    notes = ["ours_over_theirs: median over rounds of both steps in turn, below 1 where ours is faster"]
    budgeted = [row for row in rows if row["ours"] != EVERYTHING]
    known = [row for row in budgeted if not math.isnan(row["ours_over_theirs"])]
    faster = sum(row["ours_over_theirs"] <= 1 for row in known)
    above = sum(row["our_peak_bytes"] > row["peak_bytes"] for row in known)
    notes.append(
        f"at their peak: as fast or faster in {faster} of {len(budgeted)}; none within it: "
        f"{len(budgeted) - len(known)}; above it: {above}"
    )
    for row in rows:
        if row["ours"] == EVERYTHING:
            cost = 100 * (row["ours_over_theirs"] - 1)
            notes.append(f"{row['model']}: {cost:+.1f} % over torch.compile where nothing runs again")
    for name in dict.fromkeys(row["model"] for row in rows):
        least = min(row["peak_bytes"] for row in rows if row["model"] == name)
        ours = next(row["smallest_bytes"] for row in rows if row["model"] == name)
        notes.append(f"{name}: smallest budget, predicted, {100 * (1 - ours / least):.1f} % below their smallest peak")
    return [*notes, *(f"solver {each}: not run, {package} is not there" for each, package in missing(solvers).items())]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--backend", choices=list(THEIRS), default="eager")
    parser.add_argument("--solvers", nargs="*", default=list(SOLVERS))
    parser.add_argument("--budgets", nargs="*", type=float, default=list(BUDGETS), help="of torch's knob, from 0 to 1")
    parser.add_argument("--seconds", type=float, default=10.0, help="for our search, of each budget")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for row in rows_of(name, options.backend, options.solvers, options.budgets, options.rounds, options.seconds):
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    base = "graph-partitions" if options.backend == "eager" else f"graph-partitions-{options.backend}"
    title = "Plans of single ops against torch's own partitions"
    write_result(options.out, base, title, pd.DataFrame(rows), summary(rows, options.solvers))


if __name__ == "__main__":
    main()
