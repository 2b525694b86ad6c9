"""Plans per signature: solved for once, safe meanwhile, said where nothing is promised, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch

import planner
from planner.training import plan_cache
from tests.support.dynamic_layers import held_back, layers, planned, release, rows, same, state, step


@pytest.mark.slow
def test_each_new_signature_is_solved_for_once_and_counted(monkeypatch):
    model, handle = planned()
    assert handle.solves == 2
    asked = []
    solve = plan_cache.find_plan
    monkeypatch.setattr(
        plan_cache, "find_plan", lambda profile, *rest, **more: asked.append(1) or solve(profile, *rest, **more)
    )
    for _ in range(3):
        for count in (100, 200, 256):
            step(model, count)
        handle.wait()
    assert len(asked) == 2 and handle.solves == 4
    assert {key.dims[0]: count for key, count in handle.signature_counts.items()} == {64: 0, 100: 3, 200: 3, 256: 3}
    assert handle.statuses[handle.signature_of(rows(100))] == "interpolated"
    assert {key.dims[0]: status for key, status in handle.statuses.items()}[256] == "profiled"
    handle.remove()


def test_one_profile_covers_what_is_smaller_without_solving():
    model, handle = planned(sizes=(256,))
    for count in (10, 20, 256):
        step(model, count)
    handle.wait()
    assert handle.solves == 1 and set(handle.promised.values()) == {True}
    assert handle.statuses[handle.signature_of(rows(10))] == "covered"
    handle.remove()


@pytest.mark.slow
def test_beyond_what_is_known_it_says_so_once_and_runs_with_the_leanest_plan_until_profiled():
    model, handle = planned(sizes=(64, 256))
    with pytest.warns(RuntimeWarning, match="profile_now") as caught:
        for count in (300, 300, 310, 310):
            step(model, count)
            handle.wait()
    assert len(caught) == 1
    key = handle.signature_of(rows(300))
    assert handle.statuses[key] == "safe" and not handle.promised[key]
    largest = handle.plans[handle.signature_of(rows(256))]
    assert handle.plans[key].unplanned_peak_bytes == largest.unplanned_peak_bytes
    assert handle.plans[key].predicted_peak_bytes < largest.predicted_peak_bytes
    before = state(model)
    handle.profile_now(rows(320))
    assert same(state(model), before)
    step(model, 300)
    handle.wait()
    assert handle.statuses[handle.signature_of(rows(320))] == "profiled"
    assert handle.statuses[key] == "interpolated"
    handle.remove()


@pytest.mark.slow
def test_what_is_covered_by_a_size_of_which_nothing_is_promised_has_no_promise_either():
    model, handle = planned(sizes=(64, 256))
    with pytest.warns(RuntimeWarning, match="profile_now"):
        for count in (300, 290, 290):
            step(model, count)
            handle.wait()
    assert not handle.promised[handle.signature_of(rows(290))]
    handle.remove()


@pytest.mark.slow
def test_every_plan_leaves_the_headroom_and_what_its_fit_may_be_off_by():
    model, handle = planned(sizes=(64, 256), budget="90%", headroom=1000)
    step(model, 128)
    handle.wait()
    peaks = {key.dims[0]: profile.unplanned_peak_bytes for key, profile in handle._book.profiled.items()}
    left = {key.dims[0]: plan.headroom_bytes for key, plan in handle.plans.items()}
    spare_bytes = -(-(peaks[256] - peaks[64]) // 1000)  # a thousandth of what the bytes grow by
    assert left == {64: 1000, 256: 1000, 128: 1000 + spare_bytes}
    handle.remove()


@pytest.mark.slow
def test_no_plan_for_a_size_warns_with_the_smallest_budget_or_raises():
    # Sizes on a line are extrapolated; at some size no plan fits any more.
    for strict in (False, True):
        model, handle = planned(sizes=(64, 128, 256), strict=strict)
        step(model, 4000)
        handle.wait()
        with pytest.warns(RuntimeWarning, match=r"need a budget of at least \d+ bytes"):
            if strict:
                with pytest.raises(planner.Infeasible):
                    step(model, 4000)
            else:
                step(model, 4000)
        if not strict:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step(model, 4000)
            assert not handle.promised[handle.signature_of(rows(4000))]
        handle.remove()


@pytest.mark.slow
def test_a_thousand_lengths_take_no_more_than_the_cache():
    model, handle = planned(cache_size=5)
    held = held_back(handle)
    for count in range(20, 60):
        step(model, count)
    assert [key.dims[0] for key in handle.plans if key.dims[0] < 64] == [55, 56, 57, 58, 59]
    release(handle, held)
    assert handle.solves == 2  # what is below the smallest size is covered by it; what was forgotten is not looked at
    assert len(handle.plans) == 7
    with pytest.raises(ValueError, match="cache_size"):
        planned(cache_size=0)
    handle.remove()


@pytest.mark.slow
def test_an_error_on_the_thread_is_said_once_and_leaves_the_safe_plan(monkeypatch):
    model, handle = planned()

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(plan_cache, "find_plan", broken)
    with pytest.warns(RuntimeWarning, match="KeyError") as caught:
        for count in (100, 110, 120):
            step(model, count)
            handle.wait()
        step(model, 100)
    assert len(caught) == 1
    assert handle.statuses[handle.signature_of(rows(100))] == "safe"
    handle.remove()


@pytest.mark.slow
def test_eval_and_no_grad_calls_are_as_without_a_plan():
    model, handle = planned()
    plain = copy.deepcopy(model)
    x = rows(77)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    model.eval()
    model(x).sum().backward()
    assert sum(handle.signature_counts.values()) == 0 and handle.signature_of(x) not in handle.plans
    handle.remove()


@pytest.mark.slow
def test_remove_restores_the_model_and_ends_the_thread():
    model, handle = planned()
    for count in range(100, 130):
        step(model, count)
    handle.remove()
    handle.remove()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("planner-plans")]
    assert planner.handle_of(model) is None
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match="removed"):
        handle.profile_now(rows(10))
    with planner.apply(model, handle.plan):
        step(model, 256)


@pytest.mark.slow
def test_the_model_goes_although_nobody_removed_its_plans():
    model, handle = planned()
    step(model, 100)
    handle.wait()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@pytest.mark.nightly
def test_no_thread_holds_up_the_end_of_the_program():
    code = (
        "import torch, planner\n"
        "from tests.support.dynamic_layers import planned, same, state, step\n"
        "model, handle = planned()\n"
        "for count in range(65, 105): step(model, count)\n"
        "print('over')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "over" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_cannot_change_its_shapes_is_refused():
    with pytest.raises(ValueError, match="uncompiled"):
        planner.auto_checkpoint(torch.compile(layers()), rows(8), budget="90%", dynamic=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offload"):
        planned(offload="only")
    with pytest.raises(ValueError, match="dynamic=True"):
        planner.auto_checkpoint(layers(), rows(8), budget="90%", sizes=[rows(4)])
    with pytest.raises(planner.Infeasible):
        planned(budget=1000)
