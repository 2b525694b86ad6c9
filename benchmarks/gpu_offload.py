"""Offload overlap: our copies beside computing against torch's ``save_on_cpu``, at its measured peak, in turns."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from torch.autograd.graph import save_on_cpu

import planner
from benchmarks.fidelity import GPU_SETTINGS
from benchmarks.one_step import peak_bytes_of, seconds_of
from benchmarks.peer_turns import in_turns, timed_step
from benchmarks.reporting import MIB, RESULTS, result_name, write_result
from planner.zoo import build
from profiler.workload.snapshot import preserved

MODELS = ("gpt2", "resnet50")
TINY: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 4, "vocab": 64},
    "resnet50": {"hidden": 4, "image": 32, "batch": 2},
}
TINY_LINK_GBPS = 5.0  # an artificial link, where the device has none


def rows_of(name: str, device: str, tiny: bool, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for every way: nothing sent, everything sent by torch, our plans at torch's peak."""
    workload = build(name, device=device, **(TINY if tiny else GPU_SETTINGS)[name])

    def sent_by_torch() -> float:
        with save_on_cpu(pin_memory=device != "cpu"):
            return seconds_of(workload)

    with preserved(workload):
        workload.step()  # So that what the first step makes is there for all: states, workspaces.
        theirs_bytes = peak_bytes_of(workload, sent_by_torch)
        plain_bytes = peak_bytes_of(workload)
    profile = planner.profile(workload)
    plans: dict[str, planner.Plan] = {}
    for mode in ("auto", "only", "never"):
        request = planner.Offload(mode=mode, link_gbps=TINY_LINK_GBPS if profile.link is None else None)
        try:
            plans[mode] = planner.solve(profile, theirs_bytes, offload=request)
        except planner.Infeasible as refusal:
            print(f"{name}, offload {mode}: {refusal}")
            plans[mode] = planner.solve(profile, refusal.minimum_budget_bytes, offload=request)
    steps = {"plain": timed_step(workload), "save_on_cpu": sent_by_torch}
    steps |= {mode: timed_step(workload, plan) for mode, plan in plans.items()}
    with preserved(workload):
        times = in_turns(steps, rounds)
    peaks = {"plain": plain_bytes, "save_on_cpu": theirs_bytes}
    for mode, plan in plans.items():
        with planner.apply(workload.model, plan):
            peaks[mode] = planner.measure(workload, repeats=1).peak_bytes
    for way in steps:
        plan = plans.get(way)
        yield {
            "model": name,
            "way": f"our plan, offload {way}" if plan else way,
            "budget_MiB": plan.budget_bytes / MIB if plan else None,
            "peak_MiB": peaks[way] / MIB,
            "predicted_peak_MiB": plan.predicted_peak_bytes / MIB if plan else None,
            "sent_MiB": sum(stage.offloaded_bytes for stage in plan.stages) / MIB if plan else None,
            "predicted_stall_ms": plan.stall_seconds * 1e3 if plan else None,
            "seconds": times.median(way),
            "predicted_slowdown": plan.slowdown if plan else None,
            "slowdown": times.ratio(way, "plain"),
            "over_save_on_cpu": times.ratio(way, "save_on_cpu"),
        }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [row for name in options.models for row in rows_of(name, options.device, options.tiny, options.rounds)]
    notes = [
        "seconds in turns, medians of ratios round by round; budget of our plans: the peak of "
        "save_on_cpu, or where none fits that (it fetches value by value, a plan stage by stage) the smallest"
    ]
    name = result_name("offload-overlap", options.device)
    write_result(options.out, name, "Offload beside torch's save_on_cpu", pd.DataFrame(rows), notes)


if __name__ == "__main__":
    main()
