"""The examples of training on several ranks, run by torchrun as their first lines say."""

from __future__ import annotations

import re

import pytest
from torch import nn

from tests.support.late_release import late_bytes
from tests.support.nightly import by_day
from tests.support.torchrun import ROOT, output_of_ranks

EXAMPLES = ROOT / "examples"
BLOCK = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64))  # the unit of fully_shard


@pytest.mark.parametrize(
    "name", by_day(["ddp.py", "fsdp2.py", "torchtitan_style.py", "tensor_parallel.py", "pipeline_parallel.py"], [])
)
def test_an_example_trains_within_its_budget(name: str) -> None:
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert f"torchrun --nproc-per-node 2 examples/{name}" in source
    assert len(source.splitlines()) < 60
    printed = output_of_ranks(f"examples/{name}", timeout_seconds=120.0)
    assert "other than without a plan" not in printed
    said = re.findall(r"budget (\d+) bytes, measured[^\d]*([\d, ]+)", printed)
    measured = [(int(budget), int(peak)) for budget, peaks in said for peak in re.findall(r"\d+", peaks)]
    assert len(measured) == 2
    late = late_bytes(BLOCK) if name in ("fsdp2.py", "torchtitan_style.py") else 0
    assert all(0 < peak <= budget + late for budget, peak in measured)
