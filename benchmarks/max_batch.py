"""Largest batch: limits predicted from profiles at a few sizes, against the true ones found by trying sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import planner
from benchmarks.reporting import RESULTS, result_name, write_result
from planner.capacity.batch_limits import MODE_NAMES
from planner.units import parse_bytes
from planner.zoo import build

# Small models, and budgets that five samples fit without a plan: every step of the batch counts there, and trying all
# sizes takes minutes.
MODELS: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 4, "hidden": 64, "seq": 32, "vocab": 200},
    "bert": {"layers": 4, "hidden": 64, "seq": 32, "vocab": 200},
    "resnet50": {"hidden": 8, "image": 64},
    "unet": {"hidden": 4, "image": 48},
}
BUDGETS = {"gpt2": "9.2MB", "bert": "7.5MB", "resnet50": "10.5MB", "unet": "6.8MB"}
LINK_GBPS = 25.0


class Oracle:
    """Says of a size whether its step fits, from a profile at that very size and a real step; knows of no growth.

    Args:
        make: the workload at a size.
        budget_bytes: of the whole step.
        offload: what may be sent, with recomputation.
    """

    def __init__(self, make: Callable[[int], planner.Workload], budget_bytes: int, offload: planner.Offload) -> None:
        self._make = make
        self._budget_bytes = budget_bytes
        self._offload = offload
        self._profiles: dict[int, planner.Profile] = {}

    def fits(self, way: str, size: int) -> bool:
        """Whether a real step stays within the budget, with the plan solved for this size."""
        workload = self._make(size)
        if way == "none":
            return self._measured(workload) <= self._budget_bytes
        if size not in self._profiles:
            self._profiles[size] = planner.profile(workload)
        offload_request = self._offload if way == "offload" else planner.Offload(mode="never")
        try:
            plan = planner.solve(self._profiles[size], self._budget_bytes, solver="rotor", offload=offload_request)
        except planner.Infeasible:
            return False
        with planner.apply(workload.model, plan):
            return self._measured(workload) <= self._budget_bytes

    def limit(self, way: str, floor: int) -> int:
        """The largest size that fits, by doubling from ``floor``, which a weaker way fits, and bisection."""
        low, high = floor, floor + 1
        while self.fits(way, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(way, middle) else (low, middle)
        return low

    def _measured(self, workload: planner.Workload) -> int:
        return planner.measure(workload, repeats=1).peak_bytes


def rows_of(name: str, device: str, budget: str, offload: planner.Offload) -> Iterator[dict[str, Any]]:
    """A row for every way of training."""
    budget_bytes = parse_bytes(budget)

    def make(size: int) -> planner.Workload:
        return build(name, **MODELS[name], batch=size, device=device)

    found = planner.max_batch(lambda batch: make(batch), budget, offload=offload)
    oracle = Oracle(make, budget_bytes, offload)
    tried = 0
    for way in MODE_NAMES:
        limit: planner.results.Limit = getattr(found, way)
        tried = oracle.limit(way, tried)
        # Which programs a profile has depends on the seconds of ops: the search's plan may be the better one.
        true = max(tried, limit.size or 0) if limit.confirmed else tried
        yield {
            "model": name,
            "settings": " ".join(f"{key}={value}" for key, value in MODELS[name].items()),
            "budget_bytes": budget_bytes,
            "way": way,
            "profiled_at": " ".join(str(size) for size in found.profiled),
            "predicted_batch": limit.predicted_size,
            "reported_batch": limit.size,
            "tried_batch": tried,
            "true_batch": true,
            "steps_off": (limit.predicted_size or 0) - true,
            "predicted_peak_bytes": limit.predicted_peak_bytes,
            "measured_peak_bytes": limit.peak_bytes,
            "confirmed": limit.confirmed and limit.next_fails,
        }


def table(budgets: dict[str, str], device: str, offload: planner.Offload) -> pd.DataFrame:
    """The whole table."""
    return pd.DataFrame([row for name in budgets for row in rows_of(name, device, budgets[name], offload)])


def beside(path: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """The rows and those of other models in the file, in the order of the models."""
    if path.exists():
        before = pd.read_csv(path)
        frame = pd.DataFrame(pd.concat([before[~before["model"].isin(frame["model"])], frame]))
    return frame.sort_values("model", key=lambda names: names.map(list(MODELS).index), kind="stable")


def summary(frame: pd.DataFrame, link_gbps: float) -> list[str]:
    """What the table says about the promise."""
    rows = frame.to_dict("records")
    within = sum(abs(row["steps_off"]) <= 1 for row in rows)
    equal = sum(row["steps_off"] == 0 for row in rows)
    right = sum(row["reported_batch"] == row["true_batch"] for row in rows)
    return [
        f"predicted limits within one batch step of the true one: {within} of {len(rows)}; equal to it: "
        f"{equal}; limits reported after real steps that are the true one: {right}",
        "predicted before any planned step; reported after real steps at the limit and the next size; tried by "
        "doubling and bisection, with a profile of its own, a plan and a real step at every size",
        "true is the larger of tried and reported, as each is a real step within the budget: programs are found by the "
        "seconds of ops, so that two profiles may differ in them",
        f"offload over an artificial link of {link_gbps:g} GB/s on the CPU",
    ]


def main() -> None:
    """Search, try all, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--budget", help="one for all models, in place of their own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--link-gbps", type=float, default=LINK_GBPS)
    parser.add_argument("--add", action="store_true", help="keep the other models' rows of the table that is there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    budgets = {name: options.budget or BUDGETS[name] for name in options.models}
    frame = table(budgets, options.device, planner.Offload(link_gbps=options.link_gbps))
    name = result_name("max-batch", options.device)
    if options.add:
        frame = beside(options.out / f"{name}.csv", frame)
    write_result(
        options.out, name, "Largest batch: predicted against true limits", frame, summary(frame, options.link_gbps)
    )


if __name__ == "__main__":
    main()
