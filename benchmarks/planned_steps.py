"""A process of ``equal_budget``: profiles one model, then plans and steps as lines of its input say.

It runs with whichever version of the packages is on the path, so it uses only what both have. Answers are JSON, a line
each: first the bounds of the budgets, then one for each order, ``plan BYTES`` or ``step``.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import planner
from benchmarks.graph_fidelity import workload_of
from benchmarks.one_step import seconds_of

SEARCH_SECONDS = 10.0  # for each plan of single ops of a whole graph, as their own benchmark had


def bounds_of(profile: planner.Profile, search_seconds: float | None) -> dict[str, int]:
    """The smallest budget that is known to be feasible, and the unplanned peak."""
    try:
        planner.solve(profile, 1, time_limit_seconds=search_seconds)
    except planner.Infeasible as error:
        return {"smallest_bytes": error.minimum_budget_bytes, "unplanned_bytes": profile.unplanned_peak_bytes}
    raise AssertionError("a budget of one byte cannot be feasible")


def main(model: str, arguments: dict[str, Any] | None) -> None:
    """Answer orders until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    workload = workload_of(model)
    search_seconds = SEARCH_SECONDS if arguments and arguments.get("graph") else None
    profile = None if arguments is None else planner.profile(workload_of(model), **arguments)
    print(json.dumps({} if profile is None else bounds_of(profile, search_seconds)), file=answers, flush=True)
    with contextlib.ExitStack() as applied:
        for line in sys.stdin:
            order, *values = line.split()
            if order == "plan" and profile is not None:
                applied.close()
                plan = planner.solve(profile, int(values[0]), time_limit_seconds=search_seconds)
                applied.enter_context(planner.apply(workload.model, plan))
                peak = planner.measure(workload, repeats=1).peak_bytes
                answer = {"slowdown": plan.slowdown, "peak_bytes": peak}
            else:
                answer = {"seconds": seconds_of(workload)}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
