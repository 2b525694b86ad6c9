"""Chain solvers: seconds of rotor's whole frontier and of the ILP's proof, on seeded heterogeneous chains."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.reporting import RESULTS, write_result
from solvers import Chain, Problem, frontier, solve_chain
from tests.solvers.chains import large_chain

FRONTIERS = ((50, 1), (50, 4), (200, 1))
ILP_STAGES = 12
ILP_SECONDS = 30.0
DEPTHS = (0.0, 0.05, 0.15, 0.3, 0.6)


def frontier_row(stages: int, menu: int) -> dict[str, Any]:
    """The whole frontier of one chain."""
    begin = time.perf_counter()
    points = frontier(large_chain(0, stages, menu), "rotor")
    return {
        "method": "rotor, whole frontier",
        "stages": stages,
        "options": menu,
        "problems": 1,
        "points": len(points),
        "proven": "",
        "slowest_seconds": time.perf_counter() - begin,
    }


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
        "method": "ilp, proof of the optimum",
        "stages": ILP_STAGES,
        "options": menu,
        "problems": len(seconds),
        "points": "",
        "proven": proven,
        "slowest_seconds": max(seconds),
    }


def _budgets(chain: Chain) -> list[int]:
    points = frontier(chain, "rotor")
    low, high = points[0].peak_bytes or 0, points[-1].peak_bytes or 0
    return [int(low + depth * (high - low)) for depth in DEPTHS]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [frontier_row(stages, menu) for stages, menu in FRONTIERS]
    rows += [ilp_row(menu) for menu in (1, 2, 3)]
    notes = ["run on one core with: OMP_NUM_THREADS=1 taskset -c 0 (the ILP may use two)"]
    write_result(options.out, "chain-solvers", "Seconds of the chain solvers", pd.DataFrame(rows), notes)


if __name__ == "__main__":
    main()
