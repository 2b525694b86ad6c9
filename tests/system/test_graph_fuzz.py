"""A sample of the fuzz of plans of single ops: values bit for bit, bytes within budget and prediction."""

from __future__ import annotations

import pytest

from benchmarks.graph_fuzz.verdicts import BAD, judged
from tests.support.nightly import by_day

SEEDS = range(50, 60)


@pytest.mark.parametrize("seed", by_day(SEEDS, SEEDS[:4]))
def test_a_program_computes_the_same_within_its_budget(seed: int) -> None:
    outcome = judged(seed)
    assert outcome.verdict not in BAD, f"{outcome.detail}\n{outcome.source}"
    assert all(plan.measured_bytes <= plan.predicted_bytes <= plan.budget_bytes for plan in outcome.plans)
