"""The table of the largest batches."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

from rich.console import Console

from planner.capacity.batch_limits import Limit, MaxBatch
from planner.capacity.batch_report import limits_report, rows_of


def test_the_table_has_a_row_for_the_size_of_the_best_throughput():
    limit = Limit(mode="none", size=4, peak_bytes=10, samples_per_second=2.0, throughput=2.0, confirmed=True)
    unknown = {"step": 1, "budget_bytes": 99, "states_bytes": 1, "profiled": (1, 2), "linear": True, "notes": ()}
    recompute = replace(limit, mode="recompute", size=8, throughput=3.0, samples_per_second=3.0)
    offload = replace(limit, mode="offload", size=8)
    best = replace(recompute, size=6)
    limits = MaxBatch(vary="batch", none=limit, recompute=recompute, offload=offload, best=best, **unknown)
    assert limits.largest is recompute
    assert [(name, row.size) for name, row in rows_of(limits)][-1] == ("best throughput", 6)
    console = Console(width=100, record=True, file=StringIO())
    console.print(limits_report(limits))
    said = console.export_text()
    assert re.search(r"best throughput +6 +- +10 B +3 ", said)
    assert re.search("best throughput +batch=6 with recompute", said)
