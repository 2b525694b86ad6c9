"""Plans of a device that is not there, run on it: the peak is the predicted one, and what its allocator would hold."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

import planner
from planner import zoo
from planner.training.estimated_run import run_estimated
from profiler.device_record import DeviceRecord, LinkRecord, OpRate

CARD = DeviceRecord(
    name="a card of paper",
    kind="cuda",
    memory_bytes=2**30,
    origin="data sheet",
    rates=(OpRate(kind="matmul", per_second=1e12), OpRate(kind="memory", per_second=1e11, launch_seconds=1e-5)),
    link=LinkRecord(to_host_bytes_per_second=1e9, to_device_bytes_per_second=1e9),
)
build = functools.partial(zoo.build, "gpt2", layers=2, hidden=64, heads=2, vocab=128, batch=4, seq=64)


@pytest.fixture(scope="module")
def profile() -> planner.Profile:
    return planner.estimate(build, device=CARD)


@pytest.mark.parametrize("offload", ["never", "only"])
@pytest.mark.slow
def test_the_peak_is_that_of_the_plan(profile: planner.Profile, offload: Any) -> None:
    plan = planner.solve(profile, "85%", offload=offload)
    assert plan.host_bytes > 0 if offload == "only" else plan.recomputed_ops > 0
    run = run_estimated(build, plan, CARD)
    assert run.peak_bytes == plan.predicted_peak_bytes
    assert run.default is not None and run.expandable is not None
    assert run.peak_bytes < run.expandable.reserved_bytes <= run.default.reserved_bytes
    assert run.default.flushes == run.default.short_bytes == run.expandable.short_bytes == 0


@pytest.mark.slow
def test_a_device_with_too_little_memory_is_told_what_is_missing(profile: planner.Profile) -> None:
    plan = planner.solve(profile, "85%", offload="never")
    run = run_estimated(build, plan, replace(CARD, memory_bytes=plan.predicted_peak_bytes - 2**19))
    for allocator in (run.default, run.expandable):
        assert allocator is not None and allocator.flushes > 0 and allocator.short_bytes >= 2**19


@pytest.mark.slow
def test_copies_take_the_time_of_the_link(profile: planner.Profile) -> None:
    slow = planner.solve(profile, "85%", offload="only")
    with planner.plans.estimating.simulated_workload(build, CARD) as fake:
        plain = planner.measure(fake, repeats=1)
        with planner.apply(fake.model, slow):
            planned = planner.measure(fake, repeats=1)
    assert planned.seconds > plain.seconds


@pytest.mark.slow
def test_a_cpu_has_no_such_allocator() -> None:
    cpu = DeviceRecord(name="paper", kind="cpu", memory_bytes=2**30, origin="assumed", rates=CARD.rates)
    small = functools.partial(zoo.build, "mlp", layers=6, hidden=64, batch=256)
    found = planner.estimate(small, device=cpu)
    run = run_estimated(small, planner.solve(found, "85%"), cpu)
    assert run.default is None and run.expandable is None
    assert run.peak_bytes <= 0.85 * found.unplanned_peak_bytes


@pytest.mark.nightly
def test_a_head_runs_in_pieces() -> None:
    large = functools.partial(zoo.build, "gpt2", layers=1, hidden=32, heads=2, vocab=4000, batch=8, seq=256)
    found = planner.estimate(large, device=CARD, numerics="rounding")
    apart = found.in_pieces[0]
    assert apart.pieces is not None and apart.pieces.count == 2 and apart.pieces.loss_difference is None
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(found, 1)
    plan = planner.solve(found, apart.unplanned_peak_bytes, numerics="rounding")
    assert plan.budget_bytes < refused.value.minimum_budget_bytes
    assert "not known before it runs" in plan.summary()
    run = run_estimated(large, plan, CARD)
    assert run.peak_bytes == plan.predicted_peak_bytes
