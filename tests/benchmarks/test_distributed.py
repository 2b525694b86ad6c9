"""What the table of plans on several ranks says of what the ranks have measured."""

from __future__ import annotations

import pandas as pd

from benchmarks.distributed import row_of, summary
from benchmarks.distributed_engines import SIZES, blocks_of
from planner.zoo import build

MEASURED = {"budget_bytes": 100, "predicted_bytes": 99, "unplanned_bytes": 150, "said": ""}


def test_a_row_is_the_worst_ranks():
    ranks = [
        {**MEASURED, "measured_bytes": 90, "equal": True, "fingerprint": "a"},
        {**MEASURED, "measured_bytes": 101, "equal": False, "fingerprint": "b"},
    ]
    row = row_of(ranks)
    assert row["measured_bytes"] == 101 and row["measured_of_ranks"] == "90 101"
    assert not row["within"] and not row["equal"] and not row["one_plan"]
    fine = row_of([{**rank, "measured_bytes": 99, "equal": True, "fingerprint": "a"} for rank in ranks])
    assert fine["within"] and fine["equal"] and fine["one_plan"] and fine["error_percent"] == 0
    first, *_ = summary(pd.DataFrame([row, fine]))
    assert first.startswith("2 plans") and "1 above the budget" in first and "1 not the same on all ranks" in first
    assert "1.980 % of the worst rank's peak, 1 below it" in first


def test_models_are_sharded_by_their_blocks():
    blocks = {name: len(blocks_of(build(name.split()[0], **SIZES[name]).model)) for name in ("gpt2", "resnet50")}
    assert blocks == {"gpt2": 4, "resnet50": 16}
