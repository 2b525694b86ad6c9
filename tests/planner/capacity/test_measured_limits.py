"""The search for limits, on real profiles and with steps whose peaks and seconds are made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner import Offload, zoo
from planner.capacity.measured_limits import LimitSearch
from planner.capacity.predicted_limits import PredictedLimits
from planner.capacity.size_profiles import scaling_over
from planner.capacity.smallest_size import SearchStart
from planner.plans.cost_model import chain_of
from planner.runtime.step_trial import Trial
from solvers.chain.minimum_memory import shortage

STEP = 64
SIZES = (2 * STEP, 3 * STEP, 4 * STEP)
BUDGET = 700_000


def build(batch):
    return zoo.build("mlp", layers=6, hidden=32, batch=batch)


@pytest.fixture(scope="module")
def growth():
    return scaling_over(build, SIZES, menus=False, progress=lambda size: lambda what, done, total: None)


def needed(growth, size):
    """The smallest peak of any plan, as predicted."""
    return shortage(chain_of(growth.at(size))).minimum_budget_bytes


def search(growth, monkeypatch, peak, seconds=lambda size: 1.0, step=STEP) -> Any:
    """All limits, where a step takes the bytes ``peak(expected)`` says and the seconds that ``seconds(size)`` says."""
    forecast = PredictedLimits(growth, BUDGET, Offload(mode="never"))

    def train(build, size, plan, *, repeats):
        expected = forecast.plan_at("none", size)[1] if plan is None else plan.predicted_peak_bytes
        return Trial(size=size, peak_bytes=peak(plan, expected), seconds=seconds(size), plan=plan)

    monkeypatch.setattr("planner.capacity.measured_limits.run_trial", train)
    footing = SearchStart(start=step, step=step, states_bytes=1, device=torch.device("cpu"))
    return LimitSearch(build, "batch", footing, forecast, lambda what: None).run(())


def test_right_predictions_need_no_correction(growth, monkeypatch):
    found = search(growth, monkeypatch, lambda plan, expected: expected)
    assert found.recompute.size == found.recompute.predicted_size
    assert needed(growth, found.recompute.size) <= BUDGET < needed(growth, found.recompute.size + STEP)
    assert not any("off its prediction" in note for note in found.notes)


def test_a_wrong_guess_is_corrected(growth, monkeypatch):
    right = search(growth, monkeypatch, lambda plan, expected: expected)
    guesses = {"none": STEP, "recompute": 3 * right.recompute.size}
    monkeypatch.setattr(PredictedLimits, "largest", lambda self, way, **_: guesses[way])
    found = search(growth, monkeypatch, lambda plan, expected: expected)
    for way, guess in guesses.items():
        limit = getattr(found, way)
        assert (limit.size, limit.predicted_size) == (getattr(right, way).size, guess)
        assert limit.confirmed and limit.next_fails


def test_a_peak_above_its_prediction_gets_a_leaner_plan_for_the_same_size(growth, monkeypatch):
    step = 4 * STEP  # so that the largest size leaves room for other plans than the leanest
    right = search(growth, monkeypatch, lambda plan, expected: expected, step=step).recompute
    spare = BUDGET - needed(growth, right.size)
    assert right.predicted_peak_bytes + spare > BUDGET  # the first plan would be too large
    found = search(growth, monkeypatch, lambda plan, expected: expected + (spare if plan else 0), step=step)
    assert found.recompute.size == found.recompute.predicted_size == right.size
    assert found.recompute.confirmed and found.recompute.next_fails
    assert found.recompute.peak_bytes <= BUDGET
    assert found.none.size == found.none.predicted_size
    assert any("off its prediction" in note for note in found.notes)


def test_peaks_that_no_plan_makes_up_for_lower_the_limit(growth, monkeypatch):
    """Every planned peak is a twentieth higher, so the limit is where the leanest plans allow for that."""
    every = search(growth, monkeypatch, lambda plan, expected: expected * 21 // 20 if plan else expected)
    assert any("is +5.0% off its prediction" in note for note in every.notes)
    found = every.recompute
    true = max(s for s in range(STEP, found.predicted_size + 1, STEP) if needed(growth, s) * 21 // 20 <= BUDGET)
    assert true < found.predicted_size
    assert found.confirmed and found.peak_bytes <= BUDGET
    assert true - STEP <= found.size <= true


def test_where_no_plan_holds_what_it_promises_the_unplanned_limit_stands(growth, monkeypatch):
    found = search(growth, monkeypatch, lambda plan, expected: BUDGET + 1 if plan else expected)
    assert found.recompute.size == found.none.size > 0
    assert found.recompute.confirmed and found.recompute.plan is None
    assert found.recompute.peak_bytes == found.none.peak_bytes <= BUDGET
    assert found.recompute.predicted_size > found.none.size


@pytest.mark.parametrize(
    ("larger_bytes", "planned_seconds", "relative"),
    [
        (BUDGET + 1, 2.0, 1.0),  # The plan leaves room for what was too much, and is slower: nobody needs it.
        (BUDGET + 1, 0.5, 2.0),
        (None, 0.5, 1.0),  # Out of memory says not by how much: the plan recomputes nothing, so this is noise.
    ],
)
def test_of_one_size_the_faster_way_counts(growth, monkeypatch, larger_bytes, planned_seconds, relative):
    """Planned steps of sizes that do not fit unplanned take ``larger_bytes``."""
    size = search(growth, monkeypatch, lambda plan, expected: expected).none.size
    last = []

    def peak(plan, expected):
        last.append(plan)
        return expected if plan is None or plan.input_shapes[0][0] <= size else larger_bytes

    found = search(growth, monkeypatch, peak, lambda size: planned_seconds if last[-1] else 1.0)
    assert found.recompute.size == found.none.size == size
    assert found.recompute.confirmed and found.recompute.next_fails
    assert found.recompute.relative == relative
    assert (found.recompute.plan is None) == (relative == 1.0)


@pytest.fixture
def fast_between(growth, monkeypatch):
    """Predictions that sizes between the limits train ten samples in the time that others take for one."""
    right = search(growth, monkeypatch, lambda plan, expected: expected)
    low, high = right.none.size, right.recompute.size

    def seconds(size):
        return size / (10.0 if low < size < high else 1.0)

    monkeypatch.setattr(PredictedLimits, "seconds_at", lambda self, size, plan: seconds(size))
    return low, high, seconds


def test_the_best_throughput_may_lie_between_the_limits(growth, monkeypatch, fast_between):
    low, high, seconds = fast_between
    best = search(growth, monkeypatch, lambda plan, expected: expected, seconds).best
    assert low < best.size < high
    assert (best.way, best.confirmed, best.throughput) == ("recompute", True, pytest.approx(10.0))
    assert best.relative == pytest.approx(10.0)


def test_measured_seconds_decide_on_the_best_throughput(growth, monkeypatch, fast_between):
    low, _, _ = fast_between
    best = search(growth, monkeypatch, lambda plan, expected: expected, lambda size: float(size**2)).best
    assert best.size == low and best.way == "none"


def test_however_often_peaks_are_too_high_plans_leave_free_what_they_were_too_high_by(growth, monkeypatch):
    over = 100_000
    found = search(growth, monkeypatch, lambda plan, expected: expected + (over if plan else 0)).recompute
    assert found.predicted_size >= found.size + 2 * STEP  # so they were at two sizes at least
    assert found.confirmed and found.next_fails
    assert needed(growth, found.size) + over <= BUDGET < needed(growth, found.size + STEP) + over
    assert found.plan.budget_bytes == BUDGET - over
