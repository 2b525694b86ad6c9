"""A thousand training steps under a plan: the loss of every one as without it, the peak the same from the second on."""

from __future__ import annotations

import pytest

from benchmarks.long_run import METERED, STEPS, long_run


@pytest.mark.nightly
def test_a_thousand_steps_under_a_plan_have_the_losses_of_unplanned_ones_and_one_peak() -> None:
    run = long_run()
    assert len(run.planned_losses) == STEPS == 1000
    assert run.planned_losses == run.plain_losses
    assert run.planned_losses[-1] < 0.9 * run.planned_losses[0]  # it learns, so a training run is compared
    assert run.planned_peaks == (run.plan.predicted_peak_bytes,) * len(METERED)
    assert run.plain_peaks == (run.plan.unplanned_peak_bytes,) * len(METERED)
    assert run.plan.predicted_peak_bytes < run.plan.unplanned_peak_bytes
    assert run.plan.recomputed_ops > 0
