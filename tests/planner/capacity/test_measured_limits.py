"""The search for limits, on real profiles and with steps whose peaks and seconds are made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner import Offload, solve, zoo
from planner.capacity.limit_search import LimitSearch, PredictedLimits, SearchStart
from planner.capacity.scaling import scaling_over
from planner.capacity.step_trial import Trial
from planner.plans.cost_model import chain_of
from solvers.chain.persistent import shortage

STEP = 64
SIZES = (2 * STEP, 3 * STEP, 4 * STEP)
BUDGET = 930_000


def build(batch):
    return zoo.build("mlp", layers=6, hidden=32, batch=batch)


@pytest.fixture(scope="module")
def scaling():
    return scaling_over(build, SIZES, menus=False, progress=lambda size: lambda what, done, total: None)


def needed(scaling, size):
    """The smallest peak of any plan, as predicted."""
    return shortage(chain_of(scaling.at(size))).minimum_budget_bytes


def search(scaling, monkeypatch, peak, seconds=lambda size: 1.0, step=STEP) -> Any:
    """All limits, where a step takes the bytes ``peak(expected)`` says and the seconds that ``seconds(size)`` says."""
    predicted = PredictedLimits(scaling, BUDGET, Offload(mode="never"))

    def train(build, size, plan, *, repeats):
        expected = predicted.plan_at("none", size)[1] if plan is None else plan.predicted_peak_bytes
        return Trial(size=size, peak_bytes=peak(plan, expected), seconds=seconds(size), plan=plan)

    monkeypatch.setattr("planner.capacity.limit_search.run_trial", train)
    start = SearchStart(smallest=step, step=step, states_bytes=1, device=torch.device("cpu"))
    return LimitSearch(build, "batch", start, predicted, lambda what: None).run(())


def test_where_a_short_search_finds_nothing_the_quick_plan_is_taken(scaling, monkeypatch):
    predicted = PredictedLimits(scaling, BUDGET, Offload(mode="never"))
    quick = predicted.quick_plan("recompute", SIZES[-1])
    assert quick is not None

    def refuse(*_: Any, **__: Any):
        return solve(scaling.at(SIZES[-1]), 1)

    monkeypatch.setattr("planner.capacity.limit_search.find_plan", refuse)
    plan, peak_bytes = predicted.plan_at("recompute", SIZES[-1])
    assert plan is not None and plan.schedule == quick.schedule
    assert peak_bytes == quick.predicted_peak_bytes <= BUDGET


@pytest.mark.slow
def test_right_predictions_need_no_correction(scaling, monkeypatch):
    found = search(scaling, monkeypatch, lambda plan, expected: expected)
    assert found.recompute.size == found.recompute.predicted_size
    assert needed(scaling, found.recompute.size) <= BUDGET < needed(scaling, found.recompute.size + STEP)
    assert not any("off its prediction" in note for note in found.notes)


@pytest.mark.slow
def test_a_wrong_guess_is_corrected(scaling, monkeypatch):
    right = search(scaling, monkeypatch, lambda plan, expected: expected)
    guesses = {"none": STEP, "recompute": 3 * right.recompute.size}
    monkeypatch.setattr(PredictedLimits, "largest", lambda self, way, **_: guesses[way])
    found = search(scaling, monkeypatch, lambda plan, expected: expected)
    for way, guess in guesses.items():
        limit = getattr(found, way)
        assert (limit.size, limit.predicted_size) == (getattr(right, way).size, guess)
        assert limit.confirmed and limit.next_fails


def test_a_peak_above_its_prediction_gets_a_leaner_plan_for_the_same_size(scaling, monkeypatch):
    step = 4 * STEP  # so that the largest size leaves room for other plans than the leanest
    right = search(scaling, monkeypatch, lambda plan, expected: expected, step=step).recompute
    spare = BUDGET - needed(scaling, right.size)
    assert right.predicted_peak_bytes + spare > BUDGET  # the first plan would be too large
    found = search(scaling, monkeypatch, lambda plan, expected: expected + (spare if plan else 0), step=step)
    assert found.recompute.size == found.recompute.predicted_size == right.size
    assert found.recompute.confirmed and found.recompute.next_fails
    assert found.recompute.peak_bytes <= BUDGET
    assert found.none.size == found.none.predicted_size
    assert any("off its prediction" in note for note in found.notes)


def test_peaks_that_no_plan_makes_up_for_lower_the_limit(scaling, monkeypatch):
    """Every planned peak is a twentieth higher, so the limit is where the leanest plans allow for that."""
    every = search(scaling, monkeypatch, lambda plan, expected: expected * 21 // 20 if plan else expected)
    assert any("is +5.0% off its prediction" in note for note in every.notes)
    found = every.recompute
    true = max(s for s in range(STEP, found.predicted_size + 1, STEP) if needed(scaling, s) * 21 // 20 <= BUDGET)
    assert true < found.predicted_size
    assert found.confirmed and found.peak_bytes <= BUDGET
    assert true - STEP <= found.size <= true


def test_where_no_plan_holds_what_it_promises_the_unplanned_limit_stands(scaling, monkeypatch):
    found = search(scaling, monkeypatch, lambda plan, expected: BUDGET + 1 if plan else expected)
    assert found.recompute.size == found.none.size > 0
    assert found.recompute.confirmed and found.recompute.plan is None
    assert found.recompute.peak_bytes == found.none.peak_bytes <= BUDGET
    assert found.recompute.predicted_size > found.none.size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("larger_bytes", "planned_seconds", "relative"),
    [
        (BUDGET + 1, 2.0, 1.0),  # The plan leaves room for what was too much, and is slower: nobody needs it.
        (BUDGET + 1, 0.5, 2.0),
        (None, 0.5, 1.0),  # Out of memory says not by how much: the plan recomputes nothing, so this is noise.
    ],
)
def test_of_one_size_the_faster_mode_counts(scaling, monkeypatch, larger_bytes, planned_seconds, relative):
    """Planned steps of sizes that do not fit unplanned take ``larger_bytes``."""
    size = search(scaling, monkeypatch, lambda plan, expected: expected).none.size
    last = []

    def peak(plan, expected):
        last.append(plan)
        return expected if plan is None or plan.input_shapes[0][0] <= size else larger_bytes

    found = search(scaling, monkeypatch, peak, lambda size: planned_seconds if last[-1] else 1.0)
    assert found.recompute.size == found.none.size == size
    assert found.recompute.confirmed and found.recompute.next_fails
    assert found.recompute.relative == relative
    assert (found.recompute.plan is None) == (relative == 1.0)


@pytest.fixture
def fast_between(scaling, monkeypatch):
    """Predictions that sizes between the limits train ten samples in the time that others take for one."""
    right = search(scaling, monkeypatch, lambda plan, expected: expected)
    low, high = right.none.size, right.recompute.size

    def seconds(size):
        return size / (10.0 if low < size < high else 1.0)

    monkeypatch.setattr(PredictedLimits, "seconds_at", lambda self, size, plan: seconds(size))
    return low, high, seconds


def test_the_best_throughput_may_lie_between_the_limits(scaling, monkeypatch, fast_between):
    low, high, seconds = fast_between
    best = search(scaling, monkeypatch, lambda plan, expected: expected, seconds).best
    assert low < best.size < high
    assert (best.mode, best.confirmed, best.throughput) == ("recompute", True, pytest.approx(10.0))
    assert best.relative == pytest.approx(10.0)


def test_measured_seconds_decide_on_the_best_throughput(scaling, monkeypatch, fast_between):
    low, _, _ = fast_between
    best = search(scaling, monkeypatch, lambda plan, expected: expected, lambda size: float(size**2)).best
    assert best.size == low and best.mode == "none"


def test_however_often_peaks_are_too_high_plans_leave_free_what_they_were_too_high_by(scaling, monkeypatch):
    over = 100_000
    found = search(scaling, monkeypatch, lambda plan, expected: expected + (over if plan else 0)).recompute
    assert found.predicted_size >= found.size + 2 * STEP  # so they were at two sizes at least
    assert found.confirmed and found.next_fails
    assert needed(scaling, found.size) + over <= BUDGET < needed(scaling, found.size + STEP) + over
    assert found.plan.budget_bytes == BUDGET - over
