"""Copies to host memory on a CUDA device: beside the computation, pinned, right, and within the budget."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import planner
from planner.plans.offload_request import Offload
from planner.runtime.copy_engines import CudaCopyEngine, bytes_of
from planner.zoo import build
from profiler.measurement.device_memory import measure_link
from profiler.workload.workload import Workload

pytestmark = pytest.mark.gpu

SETTINGS: dict[str, Any] = {"layers": 8, "hidden": 256, "heads": 4, "seq": 256, "batch": 16}


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def work_of(name: str = "gpt2") -> Workload:
    torch.manual_seed(0)
    return build(name, device="cuda", **SETTINGS)


def gradients(work: Workload) -> list[torch.Tensor]:
    torch.manual_seed(3)
    work.zero_grad()
    work.forward().backward()
    return [p.grad.clone() for p in work.model.parameters() if p.grad is not None]


def assert_close(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    # Atomics in the embedding's backward make the last bits differ from run to run.
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_link_is_measured() -> None:
    link = measure_link(device())
    assert link is not None and link.pinned and link.devices == torch.cuda.device_count()
    assert min(link.to_host_bytes_per_second, link.to_device_bytes_per_second) > 0 and link.latency_seconds > 0


def test_bytes_survive_whatever_the_memory_is_used_for_meanwhile() -> None:
    """Sources and targets are taken from and given to torch's allocator all the time, and nobody waits on the host."""
    engine, drawn = CudaCopyEngine(device(), 64 * 2**20), random.Random(1)
    assert engine.bytes.is_pinned()
    away: list[tuple[int, Any]] = []
    back: list[tuple[int, torch.Tensor]] = []
    for turn in range(300):
        value, size = turn % 251, drawn.randrange(1, 8 * 2**20)
        copy = engine.send(bytes_of(torch.full((size,), value, dtype=torch.uint8, device=device())))
        if copy is not None:
            if drawn.random() < 0.8:
                copy.wait()
            away.append((value, copy))
        torch.full((size,), 255, dtype=torch.uint8, device=device())  # Into what was let go of, if that came too early.
        if copy is None or drawn.random() < 0.4:
            value, found = away.pop(drawn.randrange(len(away)))
            fetched = found.fetch()
            if drawn.random() < 0.8:
                back.append((value, fetched.wait()))
    away.clear()
    del copy, found, fetched
    assert engine.memory.held_bytes == 0
    assert all(bool((tensor == value).all()) for value, tensor in back)


def test_copies_end_while_the_computation_goes_on() -> None:
    engine = CudaCopyEngine(device(), 2**20)
    factor = torch.zeros(4096, 4096, device=device())
    source = torch.ones(2**20, dtype=torch.uint8, device=device())
    torch.cuda.synchronize()
    copied, computed = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    copy = engine.send(source)
    assert copy is not None
    for _ in range(50):
        factor = factor @ factor
    fetched = copy.fetch  # The way back waits for what was computed before it was asked for, and for no more.
    copied.record(engine.to_host)
    computed.record()
    torch.cuda.synchronize()
    assert copied.elapsed_time(computed) > 0
    assert bool((fetched().wait() == 1).all())


@pytest.mark.parametrize("mode", ["auto", "only"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_plan_with_copies_stays_within_its_budget_and_computes_the_same(name: str, mode: Any) -> None:
    profile = planner.profile(work_of(name))
    expected = gradients(work_of(name))
    resident = profile.resident.total
    for share in (0.5, 0.75):
        budget = int(resident + share * (profile.unplanned_peak_bytes - resident))
        plan = planner.solve(profile, budget, offload=Offload(mode=mode))
        work = work_of(name)
        with planner.apply(work.model, plan):
            assert_close(gradients(work), expected)
            measured = planner.measure(work, repeats=1)
        assert measured.peak_bytes <= budget
        assert abs(plan.predicted_peak_bytes - measured.peak_bytes) <= 0.02 * measured.peak_bytes


def unsynchronized() -> Workload:
    """A model that never waits for the device by itself; transformers' GPT-2 does, in its forward."""
    return build("mindspore_blocks", device="cuda", blocks=8, hidden=256, heads=4, seq=256, batch=16)


def test_copies_hold_up_nothing_on_the_host() -> None:
    profile = planner.profile(unsynchronized())
    resident = profile.resident.total
    budget = int(resident + 0.75 * (profile.unplanned_peak_bytes - resident))
    plan = planner.solve(profile, budget, offload=Offload(mode="only"))
    assert plan.host_bytes > 0
    work = unsynchronized()
    with planner.apply(work.model, plan):
        work.forward().backward()
        work.zero_grad()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work.forward().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_torchs_own_offload_gives_the_same_gradients() -> None:
    profile = planner.profile(work_of())
    resident = profile.resident.total
    budget = int(resident + 0.6 * (profile.unplanned_peak_bytes - resident))
    work, plain = work_of(), work_of()
    with planner.apply(work.model, planner.solve(profile, budget)):
        planned = gradients(work)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        assert_close(gradients(plain), planned)
