"""Chain solvers: seconds of whole frontiers, gaps of long chains, the closed form of uniform ones, the ILP's proof."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.random_chains import large_chain
from benchmarks.reporting import MIB, RESULTS, write_result
from solvers import Chain, Option, Problem, Stage, frontier, replay, solve_chain
from solvers.chain import baselines
from solvers.chain.persistent import shortage
from solvers.chain.revolve import forward_runs
from solvers.chain.rotor import Table

FRONTIERS = ((48, 12), (50, 1), (50, 4), (200, 1), (200, 4), (1000, 1))
LONG = 1000
LONG_DEPTHS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)  # of the way from the smallest budget to the unplanned peak
CERTIFIED = ((48, 1), (48, 12), (200, 1))
UNIFORM = ((10, 3), (50, 5), (100, 10))
ILP_STAGES = 12
ILP_SECONDS = 30.0
DEPTHS = (0.0, 0.05, 0.15, 0.3, 0.6)


def frontier_row(stages: int, menu: int) -> dict[str, Any]:
    """The whole frontier of one chain, replays and bounds included."""
    begin, used = time.perf_counter(), time.process_time()
    points = frontier(large_chain(0, stages, menu), "rotor")
    return {
        "method": "rotor, whole frontier",
        "stages": stages,
        "options": menu,
        "points": len(points),
        "largest_gap": max(point.gap or 0.0 for point in points),
        "seconds": time.perf_counter() - begin,
        "processor_seconds": time.process_time() - used,
    }


def long_rows(name: str, chain: Chain) -> list[dict[str, Any]]:
    """One whole call per budget; the first one makes the table that the others read."""
    low, top = shortage(chain).minimum_budget_bytes, replay(chain, baselines.keep_all(chain)[0]).peak_bytes
    rows = []
    for depth in LONG_DEPTHS:
        budget = int(low + depth * (top - low))
        begin = time.perf_counter()
        solution = solve_chain(Problem(chain=chain, budget_bytes=budget), "auto")
        rows.append(
            {
                "chain": name,
                "depth": depth,
                "share_of_unplanned_peak": budget / top,
                "solver": solution.solver,
                "slower_than_unplanned": (solution.seconds or 0.0) / chain.unplanned_seconds - 1,
                "gap": solution.gap,
                "seconds": time.perf_counter() - begin,
            }
        )
    return rows


def transformer(stages: int) -> Chain:
    """Attention and feed-forward stages in turn, between an embedding and a head: sizes of a small GPT."""
    attention = _stage("attention", 8, 40, 0.002, 8, 4)
    forward = _stage("feed-forward", 8, 64, 0.003, 16, 8)
    first, last = _stage("embedding", 8, 0, 0.0005, 0, 40), _stage("head", 0, 200, 0.01, 100, 40)
    return Chain(stages=(first, *((attention, forward) * ((stages - 2) // 2)), last))


def _stage(name: str, boundary: int, kept: int, seconds: float, transient: int, gradient: int) -> Stage:
    """A stage of sizes in MiB whose backward takes twice as long as its forward."""
    way = Option(
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
        kept_bytes=kept * MIB,
        forward_peak_bytes=(kept + boundary + transient) * MIB,
        backward_peak_bytes=(boundary + transient) * MIB,
        recompute_seconds=seconds,
        recompute_peak_bytes=(kept + transient) * MIB,
    )
    return Stage(
        name=name,
        options=(way,),
        boundary_bytes=boundary * MIB,
        forward_seconds=seconds,
        forward_peak_bytes=(boundary + kept // 2 + transient) * MIB,
        parameter_gradient_bytes=gradient * MIB,
        gradient_bytes=boundary * MIB,
    )


LONG_CHAINS: dict[str, Callable[[], Chain]] = {
    "random": lambda: large_chain(0, LONG),
    "random, 4 options": lambda: large_chain(0, LONG, 4),
    "homogeneous": lambda: Chain(stages=large_chain(3, 1).stages * LONG),
    "transformer": lambda: transformer(LONG),
}


def certificate_row(stages: int, menu: int) -> dict[str, Any]:
    """How far from the persistent optimum the table proves its points to be, at five depths."""
    table = Table(large_chain(0, stages, menu))
    points = table.points()
    picks = [points[round(depth * (len(points) - 1))] for depth in (0.02, 0.25, 0.5, 0.75, 0.98)]
    begin = time.perf_counter()
    errors = [table.error_seconds(point) / point.seconds for point in picks]
    spent = (time.perf_counter() - begin) / len(picks)
    return {
        "stages": stages,
        "options": menu,
        "smallest": min(errors),
        "mean": sum(errors) / len(errors),
        "largest": max(errors),
        "seconds_per_point": spent,
    }


def uniform_row(stages: int, slots: int) -> dict[str, Any]:
    """Forward runs on a chain of which one stage at a time is kept, beside a number of boundaries."""
    way = _stage("uniform", 0, 0, 1.0, 0, 0).options[0]
    way = replace(way, kept_bytes=1000, forward_peak_bytes=1001, recompute_peak_bytes=1000)
    stage = replace(_stage("uniform", 0, 0, 1.0, 0, 0), options=(way,), boundary_bytes=1, forward_peak_bytes=1)
    last = replace(stage, options=(replace(way, forward_peak_bytes=1000),), boundary_bytes=0)
    problem = Problem(chain=Chain(stages=(stage,) * (stages - 1) + (last,)), budget_bytes=1000 + slots)
    begin = time.perf_counter()
    schedules = {name: solve_chain(problem, name).schedule for name in ("revolve", "rotor")}
    runs = {name: 0 if schedule is None else schedule.forward_runs() for name, schedule in schedules.items()}
    seconds = time.perf_counter() - begin
    return {"stages": stages, "slots": slots, "closed_form": forward_runs(stages, slots), **runs, "seconds": seconds}


def ilp_row(menu: int) -> dict[str, Any]:
    """Chains of twelve stages at tight to moderate budgets."""
    seconds, proven = [], 0
    for seed in range(2):
        chain = large_chain(seed, ILP_STAGES, menu)
        for budget in _budgets(chain):
            begin = time.perf_counter()
            solution = solve_chain(Problem(chain=chain, budget_bytes=budget), "ilp", ILP_SECONDS)
            seconds.append(time.perf_counter() - begin)
            proven += solution.status == "optimal"
    return {
        "stages": ILP_STAGES,
        "options": menu,
        "problems": len(seconds),
        "proven": proven,
        "slowest_seconds": max(seconds),
    }


def _budgets(chain: Chain) -> list[int]:
    points = frontier(chain, "rotor")
    low, high = points[0].peak_bytes or 0, points[-1].peak_bytes or 0
    return [int(low + depth * (high - low)) for depth in DEPTHS]


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the first problem of each table")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    out, most = options.out, 1 if options.quick else None
    notes = ["run on one core with: OMP_NUM_THREADS=1 taskset -c 0 (the ILP may use two)"]
    rows = [frontier_row(stages, menu) for stages, menu in FRONTIERS[:most]]
    write_result(out, "chain-solvers", "Seconds of the chain solvers' whole frontiers", pd.DataFrame(rows), notes)
    rows = [row for name, make in [*LONG_CHAINS.items()][:most] for row in long_rows(name, make())]
    notes.append(f"{LONG} stages; gap: relative distance from the bound on all schedules")
    write_result(out, "chain-solvers-long", "Long chains: whole calls with auto", pd.DataFrame(rows), notes)
    rows = [certificate_row(stages, menu) for stages, menu in CERTIFIED[:most]]
    title = "Proven relative distance of the table's points from the persistent optimum"
    write_result(out, "chain-solvers-certificate", title, pd.DataFrame(rows), notes[:1])
    rows = [uniform_row(stages, slots) for stages, slots in UNIFORM[:most]]
    title = "Forward runs of uniform chains: Griewank and Walther's closed form"
    write_result(out, "chain-solvers-uniform", title, pd.DataFrame(rows), notes[:1])
    rows = [ilp_row(menu) for menu in (1, 2, 3)[:most]]
    write_result(out, "chain-solvers-ilp", "Proofs of the optimum by the ILP", pd.DataFrame(rows), notes[:1])


if __name__ == "__main__":
    main()
