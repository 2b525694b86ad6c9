"""Graph methods against the exhaustive oracle on a thousand random graphs of 3 to 8 nodes: how often each is right."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.methods.published import method_names, solve_with_any
from benchmarks.random_graphs import random_tiny_graph
from benchmarks.reporting import RESULTS, write_result
from solvers.graph import exhaustive
from solvers.graph.orders import IndexedGraph, peak_profile, seconds_of
from solvers.problem.graph import Graph
from solvers.problem.simulator import replay
from solvers.problem.solution import Solution

SEEDS = 1000
LIMIT_SECONDS = 2.0
# Methods whose trials never end use up their time wherever the bound does not prove the optimum.
SHORT_SECONDS = {"eviction": 0.05, "hierarchy": 0.05}
RELATIVE = 1e-6  # what the integer programs are solved to


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A problem and its optimum; ``optimum_seconds`` None where there is no schedule."""

    graph: Graph
    budget_bytes: int
    optimum_seconds: float | None


@dataclass(slots=True, kw_only=True)
class Tally:
    """What one method did: how often each verdict of ``judge`` fell, and the seconds it took."""

    solver: str
    counts: Counter[str] = field(default_factory=Counter)
    wall_seconds: float = 0.0


# What may not happen, whatever the method; the rest is a method's right.
WRONG = ("below", "infeasible_wrongly", "optimal_wrongly", "bound_above", "plan_of_none")
FINE = ("equal", "above", "no_plan_found", "infeasible_rightly", "infeasible_unproven")


def instances(seeds: Sequence[int]) -> Iterator[Instance]:
    """Each graph with a budget too small, the smallest one, and one midway to the unplanned peak."""
    for seed in seeds:
        graph = random_tiny_graph(seed)
        indexed = IndexedGraph(graph)
        low, high = exhaustive.smallest_peak(indexed), int(peak_profile(indexed, range(indexed.count)).max())
        for budget in (low - 1, low, (low + high) // 2):
            if budget >= 0:
                yield _instance(indexed, budget)


def _instance(indexed: IndexedGraph, budget_bytes: int) -> Instance:
    order = exhaustive.solve(indexed, budget_bytes)
    optimum = None if order is None else seconds_of(indexed, order)
    return Instance(graph=indexed.graph, budget_bytes=budget_bytes, optimum_seconds=optimum)


def judge(instance: Instance, solution: Solution) -> list[str]:
    """What can be said of an answer; seconds are small whole numbers here, so equal means equal."""
    optimum = instance.optimum_seconds
    if optimum is None:
        if solution.schedule is not None:
            return ["plan_of_none"]
        return ["infeasible_rightly" if solution.status == "infeasible" else "infeasible_unproven"]
    said = ["bound_above"] if solution.lower_bound_seconds > optimum * (1 + RELATIVE) else []
    if solution.schedule is None:
        return [*said, "infeasible_wrongly" if solution.status == "infeasible" else "no_plan_found"]
    replayed = replay(instance.graph, solution.schedule)
    assert replayed.peak_bytes <= instance.budget_bytes
    if replayed.seconds > optimum:
        return [*said, "above", *(["optimal_wrongly"] if solution.status == "optimal" else [])]
    return [*said, "equal" if replayed.seconds == optimum else "below"]


def tally(solver: str, asked: Sequence[Instance]) -> Tally:
    """One method on every instance, asked for the optimum itself."""
    result = Tally(solver=solver)
    for instance in asked:
        begin = time.perf_counter()
        solution = solve_with_any(
            instance.graph, instance.budget_bytes, solver, SHORT_SECONDS.get(solver, LIMIT_SECONDS), gap=0.0
        )
        result.wall_seconds += time.perf_counter() - begin
        result.counts.update(judge(instance, solution))
    return result


def table(tallies: Sequence[Tally], instance_count: int) -> pd.DataFrame:
    """A row per method."""
    return pd.DataFrame([_row(each, instance_count) for each in tallies])


def _row(each: Tally, instance_count: int) -> dict[str, Any]:
    wrong = sum(each.counts[name] for name in WRONG)
    counts = {name: each.counts[name] for name in (*FINE, *WRONG)}
    return {
        "solver": each.solver,
        "instances": instance_count,
        **counts,
        "verdict": "wrong" if wrong else "never wrong",
        "seconds": each.wall_seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask, count, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--solvers", nargs="+", choices=method_names(), default=method_names())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    asked = list(instances(range(options.seeds)))
    tallies = [tally(solver, asked) for solver in options.solvers]
    feasible = sum(instance.optimum_seconds is not None for instance in asked)
    remarks = [
        f"{options.seeds} graphs of benchmarks/random_graphs.py, budgets: one byte less than the smallest feasible, "
        f"that one, and midway to the unplanned peak; {feasible} of {len(asked)} are feasible",
        f"limit {LIMIT_SECONDS:g} s, {', '.join(f'{name} {limit:g} s' for name, limit in SHORT_SECONDS.items())}",
        f"equal to the optimum, above it, and so on; has to be 0: {', '.join(WRONG)}",
        "auto asks the oracle itself at this size; its searches stand in the other rows",
        "infeasible_unproven, no_plan_found: the method said that it does not know",
    ]
    title = "Graph methods against the exhaustive oracle"
    write_result(options.out, "graph-oracle", title, table(tallies, len(asked)), remarks)


if __name__ == "__main__":
    main()
