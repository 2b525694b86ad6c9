"""Frameworks' loops on two ranks of torchrun: losses as without a budget, one plan, and peaks within it."""

from __future__ import annotations

import json

import pytest
from torch import nn

from tests.support.late_release import late_bytes
from tests.support.torchrun import output_of_ranks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "lightning-ddp", "lightning-fsdp2"])
@pytest.mark.nightly
def test_losses_stay_and_all_ranks_have_one_plan(kind: str) -> None:
    printed = output_of_ranks("-m", "tests.support.framework_ranks", kind)
    said = [json.loads(line) for line in printed.splitlines() if line.startswith('{"losses"')]
    assert len(said) == 2 and said[0]["fingerprint"] == said[1]["fingerprint"]
    assert all(each["equal"] and each["losses"] == 5 for each in said)
    late = late_bytes(nn.Linear(64, 64)) if kind == "lightning-fsdp2" else 0
    assert all(0 < each["measured_peak_bytes"] <= each["budget_bytes"] + late for each in said)
