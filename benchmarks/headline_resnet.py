"""ResNet-50 with the checkpoints of Paddle's example, the 16 residual sums, against what the solver chooses."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

import planner
from benchmarks.fidelity import GPU_SETTINGS
from benchmarks.peer_turns import in_turns, timed_step
from benchmarks.reporting import MIB, RESULTS, result_name, write_result
from planner.zoo import build
from profiler.workload.snapshot import preserved

# res2a ... res5c in Paddle's example; each bottleneck returns its residual sum.
CHECKPOINTS = planner.Rules(checkpoints="ResNetBottleNeckLayer")
SEARCHES = 12  # halvings of the range of budgets


def plans_of(profile: planner.Profile) -> dict[str, planner.Plan]:
    """The stated plan; the solver's at the peak that it needs; the solver's leanest that is predicted as fast.

    The stated plan's budget is its peak, so the second is both the same peak and the same budget.
    """
    stated = planner.state(profile, CHECKPOINTS)
    same = planner.solve(profile, stated.predicted_peak_bytes)
    return {"by hand": stated, "solver, same budget": same, "solver, same seconds": _leanest(profile, stated, same)}


def _leanest(profile: planner.Profile, stated: planner.Plan, best: planner.Plan) -> planner.Plan:
    """By halving: more bytes never make a plan slower."""
    low, high = profile.resident.total, best.budget_bytes
    for _ in range(SEARCHES):
        middle = (low + high) // 2
        try:
            plan = planner.solve(profile, middle, solver="rotor")
        except planner.Infeasible:
            low = middle
            continue
        if plan.predicted_seconds <= stated.predicted_seconds:
            best, high = plan, middle
        else:
            low = middle
    return best


def rows_of(workload: planner.Workload, rounds: int) -> list[dict[str, Any]]:
    """The unplanned model and the three plans, timed in turns."""
    plans = plans_of(planner.profile(workload, rules=CHECKPOINTS))
    peaks = {"no plan": planner.measure(workload, repeats=1).peak_bytes}
    for name, plan in plans.items():
        with planner.apply(workload.model, plan):
            peaks[name] = planner.measure(workload, repeats=1).peak_bytes
    with preserved(workload):
        steps = {name: timed_step(workload, plan) for name, plan in plans.items()}
        times = in_turns({"no plan": timed_step(workload), **steps}, rounds)
    first = next(iter(plans.values()))
    return [
        {
            "way": name,
            "predicted_peak_MiB": (plans[name].predicted_peak_bytes if name in plans else first.unplanned_peak_bytes)
            / MIB,
            "measured_peak_MiB": peaks[name] / MIB,
            "recomputed_ops": plans[name].recomputed_ops if name in plans else 0,
            "predicted_seconds": plans[name].predicted_seconds if name in plans else first.unplanned_seconds,
            "measured_seconds": times.median(name),
            "predicted_slowdown": plans[name].slowdown if name in plans else 1.0,
            "measured_slowdown": times.ratio(name, "no plan"),
        }
        for name in peaks
    ]


def write(folder: Path, device: str, rounds: int) -> None:
    """Measure, print and write the table."""
    settings = GPU_SETTINGS["resnet50"] if device.startswith("cuda") else {}
    workload = build("resnet50", device=device, **settings)
    notes = [
        "by hand: checkpoints 2a 2b 2c 3a 3b 3c 3d 4a 4b 4c 4d 4e 4f 5a 5b 5c as in Paddle's example, stated as "
        '`planner.Rules(checkpoints="ResNetBottleNeckLayer")`; its budget is the peak that it needs',
        "same budget: the solver within the peak of the plan by hand; same seconds: the smallest budget at which the "
        f"solver's plan is predicted to be as fast; slowdowns: median of {rounds} rounds in turns",
    ]
    frame = pd.DataFrame(rows_of(workload, rounds))
    write_result(
        folder, result_name("headline-resnet50", device), "ResNet-50: checkpoints by hand and solved", frame, notes
    )


def main() -> None:
    """The ResNet-50 part alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    write(options.out, options.device, options.rounds)


if __name__ == "__main__":
    main()
