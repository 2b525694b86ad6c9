"""A Llama of 7B's shape in a fixed memory: without a plan, every block checkpointed, and under plans; bfloat16."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import planner
from benchmarks.peer_methods import eager_peers
from benchmarks.reporting import MIB, RESULTS, result_name, write_rows
from planner.units import format_bytes, parse_bytes
from planner.zoo import build
from profiler.measurement.device_memory import ran_out, release_cache

SHAPE: dict[str, Any] = {"layers": 32, "hidden": 4096, "heads": 32, "seq": 2048, "vocab": 32000}
TINY: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 2, "seq": 16, "vocab": 64}
TRAINED: dict[str, Any] = {"precision": "bf16", "optimizer": "sgd"}
CHECKPOINT = next(peer for peer in eager_peers() if peer.name == "checkpoint")


def rows_of(settings: dict[str, Any], budget_bytes: int, limited: bool) -> Iterator[dict[str, Any]]:
    """A row for every way; one that runs out of memory says so.

    Args:
        settings: of the zoo's llama.
        budget_bytes: that plans are solved for.
        limited: whether profiling keeps to the budget, too.
    """
    with torch.device(settings["device"]):  # Drawn there: a host takes minutes for as many numbers.
        workload = build("llama", **settings)
    tokens = settings["batch"] * settings["seq"]
    yield _row("no plan", tokens, workload)
    profile = planner.profile(workload, limit=budget_bytes) if limited else planner.profile(workload)
    for name in ("auto", "recompute_all"):
        try:
            plan = planner.solve(profile, budget_bytes, solver=name)
        except planner.Infeasible as refusal:
            yield {"way": f"plan, {name}", "said": str(refusal)}
            continue
        with planner.apply(workload.model, plan):
            yield {**_row(f"plan, {name}", tokens, workload), "predicted_peak_MiB": plan.predicted_peak_bytes / MIB}
    with CHECKPOINT.installed(workload):  # last: it stays on the model
        yield _row("every block checkpointed", tokens, workload)


def _row(way: str, tokens: int, workload: planner.Workload) -> dict[str, Any]:
    release_cache(workload.device)
    try:
        found = planner.measure(workload)
    except Exception as error:
        if not ran_out(error):
            raise
        return {"way": way, "said": "out of memory"}
    return {
        "way": way,
        "measured_peak_MiB": found.peak_bytes / MIB,
        "reserved_MiB": found.reserved_bytes / MIB if found.reserved_bytes is not None else None,
        "seconds": found.seconds,
        "tokens_per_second": tokens / found.seconds,
        "said": "",
    }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--memory", default="80GB", help="a larger device is capped to it, a smaller one is taken whole"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--headroom", type=float, default=0.05, help="share of it left to the allocator")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    memory_bytes = parse_bytes(options.memory)
    if options.device != "cpu":
        total = torch.cuda.get_device_properties(0).total_memory
        memory_bytes = min(memory_bytes, total)
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total))
    shape = TINY if options.tiny else SHAPE
    settings = {**shape, **TRAINED, "batch": options.batch, "device": options.device}
    budget_bytes = int((1 - options.headroom) * memory_bytes)
    columns = ["way", "predicted_peak_MiB", "measured_peak_MiB", "reserved_MiB", "seconds", "tokens_per_second", "said"]
    rows = rows_of(settings, budget_bytes, options.device != "cpu")
    notes = [f"the device has {format_bytes(memory_bytes)}"] if memory_bytes < parse_bytes(options.memory) else []
    notes += [f"{settings}; cap {format_bytes(memory_bytes)}, budget of plans {format_bytes(budget_bytes)}"]
    name = result_name(f"llama-7b-{options.memory}", options.device)
    write_rows(options.out, name, f"Llama of 7B's shape in {options.memory}", rows, lambda _: notes, columns)


if __name__ == "__main__":
    main()
