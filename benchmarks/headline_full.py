"""The headline on a GPU: BERT-Large with 32 GB, unfused and fused attention, the largest batch of each way."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

import planner
from benchmarks.headline_models import ATTENTION
from benchmarks.headline_rows import Row
from planner.capacity.batch_limits import MODE_NAMES
from planner.units import format_bytes, parse_bytes

TARGET = "benchmarks.headline_models:bert_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """What the full form gave: rows, and sentences on how they came about."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def full(budget: str) -> Full:
    """The limits of every way with each kind of attention, the allocator held to the budget on a larger card."""
    budget_bytes = parse_bytes(budget)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total))
    rows: list[Row] = []
    notes = [
        f"cap: {format_bytes(budget_bytes)} of {format_bytes(total)}, for tensors as for what the allocator holds "
        "beside them: running out of either counts as not fitting",
    ]
    for attention in ATTENTION:
        found = planner.max_batch(
            TARGET, budget_bytes, settings={"attention": attention, "device": "cuda"}, progress=_progress
        )
        rows += rows_of(found, f"bert_large, {attention}")
        notes += [f"{attention}: profiled at {', '.join(map(str, found.profiled))}", *found.notes]
    return Full(rows=tuple(rows), notes=tuple(notes))


def rows_of(found: planner.results.MaxBatch, form: str) -> list[Row]:
    """The limits of a search as rows; a way that is not open, or fits nothing, has none."""
    rows: list[Row] = []
    for key, way in MODE_NAMES.items():
        limit: planner.results.Limit = getattr(found, key)
        if not limit.size:
            continue
        rows.append(
            Row(
                form=form,
                way=way,
                batch=limit.size,
                rate=limit.samples_per_second,
                base=rows[0] if rows and found.none.size else None,
                predicted_peak_bytes=limit.predicted_peak_bytes,
                measured_peak_bytes=limit.peak_bytes if limit.confirmed else None,
                remark=limit.reason or ("" if limit.confirmed else "predicted"),
            )
        )
    return rows


def _progress(what: str, done: int, total: int) -> None:
    print(f"headline: {what} ({done} of {total})", file=sys.stderr, flush=True)
