"""What the first steps of a planned loop hold beside what the plan counts on is said, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.runtime import loop_watch
from planner.runtime.plan_checks import PlanWarnings
from profiler.measurement.device_memory import RequestedBytes
from profiler.workload.workload import Workload

WIDTH, CLASSES, BATCH = 16, 2000, 32


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def loss_of(scores: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, torch.zeros(BATCH, dtype=torch.long))


Step = Callable[[nn.Module, Tensor, torch.optim.Optimizer, dict[str, Tensor]], None]


def usual(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, held: dict[str, Tensor]) -> None:
    held["scores"] = model(x)
    loss = loss_of(held["scores"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def let_go(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, held: dict[str, Tensor]) -> None:
    loss_of(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def tutorial(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, held: dict[str, Tensor]) -> None:
    held["scores"] = model(x)
    loss = loss_of(held["scores"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def collecting(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer, held: dict[str, Tensor]) -> None:
    held[f"scores {len(held)}"] = model(x)
    loss_of(held[f"scores {len(held) - 1}"]).backward()
    optimizer.step()
    optimizer.zero_grad()


def said(step: Step, *, keeps_output: bool, watch: bool | None = None, steps: int = 6) -> list[str]:
    """What is said of a loop of such steps, under the smallest plan."""
    torch.manual_seed(0)
    model, x = Classifier(), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    work = Workload(model=model, inputs=x, loss=loss_of, optimizer=optimizer, keeps_output=keeps_output)
    profile = planner.profile(work, stages=["blocks.*", "head"], menus=False)
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(profile, 1)
    plan = planner.solve(profile, refusal.value.minimum_budget_bytes)
    held: dict[str, Tensor] = {}
    with warnings.catch_warnings(record=True) as caught, planner.apply(model, plan, watch=watch):
        warnings.simplefilter("always")
        for _ in range(steps):
            step(model, x, optimizer, held)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("watch", [None, True])
@pytest.mark.parametrize(("step", "keeps_output"), [(usual, True), (let_go, True), (let_go, False)])
@pytest.mark.slow
def test_nothing_is_said_of_a_loop_within_its_plan(step: Step, keeps_output: bool, watch: bool | None) -> None:
    assert said(step, keeps_output=keeps_output, watch=watch) == []


def test_an_output_that_the_plan_does_not_count_on_is_named_with_its_maker() -> None:
    (found,) = said(usual, keeps_output=False)
    size = planner.units.format_bytes(BATCH * CLASSES * 4)
    assert f"still holds the model's output, {size}, made by head: the peak may be {size} higher" in found
    assert "delete it before backward, or profile with keeps_output=True" in found


def test_outputs_that_pile_up_are_said() -> None:
    (found,) = said(collecting, keeps_output=True)
    assert "still holds the model's output" in found
    assert "keep one at a time" in found


def test_gradients_that_the_plan_does_not_count_on_are_said_at_once() -> None:
    found = said(tutorial, keeps_output=True, steps=2)
    gradients = planner.units.format_bytes(sum(p.numel() * 4 for p in Classifier().parameters()))
    assert [
        text
        for text in found
        if f"gradients of {gradients} are alive as a forward begins, and the plan counts on 0 B" in text
    ]
    assert "zero_grad" in found[0]


def test_on_request_the_peak_of_a_step_is_taken_on_the_cpu() -> None:
    found = said(usual, keeps_output=False, watch=True)
    assert any("a step of your loop takes" in text and "above the budget" in text for text in found)
    assert not any("above the budget" in text for text in said(usual, keeps_output=False, watch=None))


def test_the_peak_of_a_step_of_ones_own_has_what_the_step_refers_to() -> None:
    torch.manual_seed(0)
    model, data = Classifier(), torch.randn(8, BATCH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        let_go(model, data[0], optimizer, {})

    workload = Workload(model=model, step=step, optimizer=optimizer)
    plan = planner.solve(planner.profile(workload), "100%")
    with planner.apply(model, plan, watch=True) as handle:
        for _ in range(5):
            step()
    assert plan.resident is not None and plan.resident.loop >= data.nbytes
    assert handle.measured_peak_bytes == plan.predicted_peak_bytes


def test_an_output_bound_from_one_micro_batch_to_the_next_is_in_a_plan_of_that_step() -> None:
    torch.manual_seed(0)
    model, batches = Classifier(), torch.randn(3, BATCH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for batch in batches:
            scores = model(batch)
            loss_of(scores).backward()
        optimizer.step()

    plan = planner.solve(planner.profile(Workload(model=model, step=step, optimizer=optimizer)), "100%")
    with warnings.catch_warnings(), planner.apply(model, plan):
        warnings.simplefilter("error")
        for _ in range(3):
            step()


class DeviceCounters:
    """Of a CUDA device, in place of one: bytes that tensors ask for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: int, peak: int) -> None:
        self.now, self.peak = now, peak
        monkeypatch.setattr(loop_watch, "requested_bytes", lambda device: RequestedBytes(self.now, self.peak))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.now))

    def run_step(self, model: nn.Module, step_bytes: int, left_bytes: int = 0) -> None:
        self.peak = max(self.peak, self.now + left_bytes + step_bytes)
        self.now += left_bytes
        torch.optim.SGD(model.parameters()).step()


@pytest.mark.parametrize("others_bytes", [0, 2**30])
def test_on_cuda_others_on_the_device_are_no_part_of_a_steps_peak(
    monkeypatch: pytest.MonkeyPatch, others_bytes: int
) -> None:
    model = Classifier()
    work = Workload(model=model, inputs=torch.randn(BATCH, WIDTH), loss=loss_of, keeps_output=False)
    plan = planner.solve(planner.profile(work, stages=["blocks.*", "head"], menus=False), "100%")
    now_bytes, step_bytes = others_bytes + plan.resident_bytes, plan.budget_bytes - plan.resident_bytes
    counters = DeviceCounters(monkeypatch, now=now_bytes, peak=now_bytes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch = loop_watch.LoopWatch(plan, model, torch.device("cuda", 0), PlanWarnings(), metered=True)
        watch.forward_begins()
        counters.run_step(model, step_bytes, left_bytes=2**25)  # The first step makes a workspace, which stays.
        watch.forward_begins()
        assert watch.peak_bytes == plan.budget_bytes
        counters.now -= others_bytes // 2
        counters.run_step(model, 0)
        watch.forward_begins()  # No new peak: what is there now says nothing of the one before.
        assert watch.peak_bytes == plan.budget_bytes
        assert not [each for each in caught if "above the budget" in str(each.message)]
        counters.run_step(model, 2**31)
        watch.forward_begins()
    assert watch.peak_bytes == plan.resident_bytes + 2**31
    assert len([each for each in caught if "above the budget" in str(each.message)]) == 1


def stack_and_step(micro_batches: int, *, fused: bool = False) -> tuple[nn.Module, Callable[[], None], list[int]]:
    """A model, a step of so many micro-batches, and bytes that it takes beside them, before its update, in a list."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    x, beside_bytes = torch.randn(512, 64), [0]

    def step() -> None:
        optimizer.zero_grad(set_to_none=not fused)
        for part in x.chunk(micro_batches):
            (model(part).square().mean() / micro_batches).backward()
        del part
        torch.empty(beside_bytes[0], dtype=torch.uint8)
        optimizer.step()

    return model, step, beside_bytes


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
@pytest.mark.slow
def test_a_step_lasts_from_update_to_update_however_many_forwards_it_has(micro_batches: int, fused: bool) -> None:
    model, step, beside_bytes = stack_and_step(micro_batches, fused=fused)
    plan = planner.solve(planner.profile(planner.Workload(model=model, step=step), menus=False), "100%")
    with planner.apply(model, plan, watch=True) as handle:
        for _ in range(4):
            step()
    assert handle.measured_peak_bytes == plan.predicted_peak_bytes
    beside_bytes[0] = 50_000_000
    with warnings.catch_warnings(record=True) as caught, planner.apply(model, plan, watch=True) as handle:
        warnings.simplefilter("always")
        for _ in range(4):
            step()
    assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes > beside_bytes[0]
    assert [each for each in caught if "a step of your loop takes" in str(each.message)]


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.slow
def test_steps_that_are_measured_are_none_of_the_loop(micro_batches: int, before: int) -> None:
    model, step, _ = stack_and_step(micro_batches)
    workload = planner.Workload(model=model, step=step)
    plan = planner.solve(planner.profile(workload, menus=False), "100%")
    with planner.apply(model, plan, watch=True) as handle:
        for _ in range(before):
            step()
        assert planner.measure(workload, repeats=1).peak_bytes == plan.predicted_peak_bytes
        assert handle.measured_peak_bytes is None
        for _ in range(4):
            step()
    assert handle.measured_peak_bytes == plan.predicted_peak_bytes


@pytest.mark.parametrize("before", range(6))
@pytest.mark.slow
def test_a_profiler_of_the_users_own_sees_its_steps(before: int) -> None:
    model, step, _ = stack_and_step(1)
    plan = planner.solve(planner.profile(planner.Workload(model=model, step=step), menus=False), "100%")
    with warnings.catch_warnings(record=True) as caught, planner.apply(model, plan, watch=True) as handle:
        warnings.simplefilter("always")
        for _ in range(before):
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            for _ in range(3):
                step()
        for _ in range(4):
            step()
    assert sum(event.key == "Optimizer.step#AdamW.step" for event in profiled.key_averages()) == 1
    assert sum(event.name == "aten::addmm" for event in profiled.events() or []) == 18
    taken_away = 2 <= before < 4
    assert (handle.measured_peak_bytes is None) == taken_away
    assert any("another profiler was begun" in str(each.message) for each in caught) == taken_away


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.slow
def test_no_profiler_runs_once_the_plan_is_taken_off(steps: int) -> None:
    model, step, _ = stack_and_step(1)
    plan = planner.solve(planner.profile(planner.Workload(model=model, step=step), menus=False), "100%")
    with planner.apply(model, plan, watch=True):
        for _ in range(steps):
            step()
    assert not torch.autograd._profiler_enabled()


def test_an_output_that_a_step_of_ones_own_lets_go_of_is_to_be_let_go_of_in_the_loop() -> None:
    torch.manual_seed(0)
    model, x = Classifier(), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        let_go(model, x, optimizer, {})

    plan = planner.solve(planner.profile(planner.Workload(model=model, step=step), menus=False), "100%")
    held: dict[str, Tensor] = {}
    with warnings.catch_warnings(record=True) as caught, planner.apply(model, plan):
        warnings.simplefilter("always")
        for _ in range(4):
            usual(model, x, optimizer, held)
    (found,) = [str(each.message) for each in caught if "still holds" in str(each.message)]
    assert "delete it before the next forward, or profile a step that holds it" in found
