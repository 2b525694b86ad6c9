"""What only a CUDA device can show: the same promises, measured with its own allocator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import planner
from planner.zoo import build
from profiler.measurement.meter import memory_meter, metered
from profiler.workload.workload import Workload

pytestmark = pytest.mark.gpu

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 6, "hidden": 256, "heads": 4, "seq": 256, "batch": 8},
    "bert": {"layers": 6, "hidden": 256, "heads": 4, "seq": 256, "batch": 8},
    "resnet50": {"hidden": 32, "image": 128, "batch": 16},
    "unet": {"hidden": 16, "image": 128, "batch": 8},
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Bit-equality is promised where kernels are deterministic."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


def budgets(profile: planner.Profile) -> list[int]:
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1, solver="rotor")
    smallest = caught.value.minimum_budget_bytes
    return [smallest, (smallest + profile.unplanned_peak_bytes) // 2]


def losses(work: Workload) -> list[float]:
    torch.manual_seed(3)
    return [work.step() for _ in range(2)]


@pytest.mark.parametrize("name", SMALL)
def test_losses_are_equal_and_the_peak_is_as_predicted(name: str) -> None:
    profile = planner.profile(build(name, device="cuda", **SMALL[name]))
    expected = losses(build(name, device="cuda", **SMALL[name]))
    for budget in budgets(profile):
        plan = planner.solve(profile, budget, solver="rotor")
        work = build(name, device="cuda", **SMALL[name])
        with planner.apply(work.model, plan):
            assert losses(work) == pytest.approx(expected, rel=1e-5)
            measured = planner.measure(work, repeats=1)
        assert measured.peak_bytes <= budget
        assert abs(plan.predicted_peak_bytes - measured.peak_bytes) <= 0.02 * measured.peak_bytes


def test_dropout_masks_are_drawn_again_on_the_device() -> None:
    work = build("gpt2", device="cuda", **SMALL["gpt2"])
    plan = planner.solve(profile := planner.profile(work), budgets(profile)[0], solver="rotor")

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(11)
        work.zero_grad()
        work.forward().backward()
        return [p.grad.clone() for p in work.model.parameters() if p.grad is not None]

    expected = gradients()
    with planner.apply(work.model, plan):
        planned = gradients()
    # Another mask would change gradients by their own size; atomics in the embedding's backward only by rounding.
    for before, after in zip(expected, planned, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-5)


def test_the_meter_is_the_allocators_own_peak() -> None:
    device = torch.device("cuda")
    torch.ones(1, device=device)
    before = torch.cuda.memory_allocated()
    size = 4 * 2**20

    def run() -> None:
        kept = torch.empty(size, dtype=torch.uint8, device=device)
        torch.empty(2 * size, dtype=torch.uint8, device=device)
        del kept

    assert metered(memory_meter(device, 0), run).peak_bytes == 3 * size
    assert torch.cuda.memory_allocated() == before


def test_autocast_is_reinstated_on_the_device() -> None:
    work = build("bert", device="cuda", **SMALL["bert"])
    work.autocast = torch.bfloat16
    profile = planner.profile(work)
    torch.manual_seed(0)
    expected = work.forward()
    expected.backward()
    plan = planner.solve(profile, budgets(profile)[0], solver="rotor")
    with planner.apply(work.model, plan):
        work.zero_grad()
        torch.manual_seed(0)
        loss = work.forward()
        loss.backward()
    assert torch.equal(loss, expected)


def test_a_profile_from_the_device_can_be_planned_anywhere(tmp_path: Any) -> None:
    profile = planner.profile(build("bert", device="cuda", **SMALL["bert"]))
    profile.save(tmp_path / "profile.json")
    again = planner.Profile.load(tmp_path / "profile.json")
    assert again == profile and again.device.startswith("cuda")
    assert planner.solve(again, budgets(again)[1], solver="rotor").schedule
