"""BERT-Large in a fixed memory on the device: the largest batch of every way and its speed, one kind of attention."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import planner
from benchmarks.headline_full import TARGET, rows_of
from benchmarks.headline_models import ATTENTION
from benchmarks.headline_rows import table
from benchmarks.reporting import RESULTS, result_name, write_result
from planner.units import format_bytes, parse_bytes

TINY: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "seq": 16, "vocab": 64, "masked": 4, "amp": "none"}


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", choices=ATTENTION, default=ATTENTION[0])
    parser.add_argument("--memory", default="32GB", help="a larger device is capped to it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    budget_bytes = parse_bytes(options.memory)
    if options.device != "cpu":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total))
    settings = {"attention": options.attention, "device": options.device, **(TINY if options.tiny else {})}
    found = planner.max_batch(TARGET, budget_bytes, settings=settings, progress=_progress)
    rows = rows_of(found, f"bert_large, {options.attention}")
    notes = [f"cap: {format_bytes(budget_bytes)}", f"profiled at {', '.join(map(str, found.profiled))}", *found.notes]
    name = result_name(f"bert-large-{options.attention}", options.device)
    frame = table(rows)
    write_result(options.out, name, f"BERT-Large in {options.memory}, {options.attention} attention", frame, notes)


def _progress(what: str, done: int, total: int) -> None:
    print(f"{what} ({done} of {total})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
