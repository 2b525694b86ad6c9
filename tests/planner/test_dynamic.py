"""Batches of changing shapes: exact under every plan, within the budget, solved for once, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import random
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner import zoo
from planner.training import plan_cache
from planner.training.dynamic_shapes import DynamicHandle
from profiler.workload.workload import Workload

SHARE = 0.6  # of the unplanned peak of the largest batch


class Convolutions(nn.Module):
    """Takes images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        )

    def forward(self, images: Tensor) -> Tensor:
        images = self.first(images)
        for block in self.blocks:
            images = images + block(images)
        return images.mean()


def language(name: str) -> tuple[nn.Module, Callable[[int], Any]]:
    longest = zoo.build(name, layers=2, batch=2, hidden=32, heads=2, seq=96, vocab=60, optimizer="none")
    inputs: Any = longest.inputs

    def batch(length: int) -> dict[str, Tensor]:
        shorter = {key: value[:, :length].contiguous() for key, value in inputs.items()}
        if name == "bert":
            shorter["attention_mask"] = (torch.arange(length) < length - torch.tensor([[0], [3]])).long()
        return shorter

    return longest.model, batch


def images() -> tuple[nn.Module, Callable[[int], Any]]:
    return Convolutions(), lambda size: torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(size))


SETTINGS: dict[str, tuple[Callable[[], Any], list[int], list[int]]] = {
    "gpt2": (lambda: language("gpt2"), [24, 96], [33, 90]),
    "bert": (lambda: language("bert"), [24, 96], [16, 90]),
    "convolutions": (images, [16, 32, 48], [12, 17, 48]),
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def trained(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Callable[[int], Any], list[int]]:
    """A planned model, an unplanned copy, batches of any size, and sizes to run."""
    torch.manual_seed(0)
    build, sizes, lengths = SETTINGS[request.param]
    model, batch = build()
    plain = copy.deepcopy(model)
    largest = planner.measure(Workload(model=plain, inputs=batch(sizes[-1])), repeats=1)
    examples = [batch(size) for size in sizes[:-1]]
    budget = int(SHARE * largest.peak_bytes)
    planner.auto_checkpoint(model, batch(sizes[-1]), budget=budget, dynamic=True, sizes=examples)
    return model, plain, batch, lengths


def handle_of(model: nn.Module) -> DynamicHandle:
    handle = planner.handle_of(model)
    assert isinstance(handle, DynamicHandle)
    return handle


def loss_of(model: nn.Module, inputs: Any) -> Tensor:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return output if isinstance(output, Tensor) else output.loss


def state(model: nn.Module) -> list[Tensor]:
    """Gradients and buffers."""
    grads = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*grads, *(buffer.clone() for buffer in model.buffers())]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def run(model: nn.Module, batches: list[Any]) -> list[Tensor]:
    """Gradients and buffers after each batch, every one added to those before."""
    torch.manual_seed(3)
    model.zero_grad()
    found = []
    for inputs in batches:
        loss = loss_of(model, inputs)
        loss.backward()
        found += [loss.detach(), *state(model)]
    return found


def test_a_changing_sequence_is_exact_while_plans_come_in(trained):
    model, plain, batch, lengths = trained
    rng = random.Random(5)
    batches = [batch(rng.choice(lengths)) for _ in range(8)]
    assert same(run(model, batches), run(plain, batches))
    handle_of(model).wait()
    assert same(run(model, batches), run(plain, batches))


def test_two_graphs_of_different_signatures_alive_at_once_are_exact(trained):
    model, plain, batch, lengths = trained
    for planned in (model, plain):
        planned.zero_grad()
    results = []
    for planned in (model, plain):
        torch.manual_seed(4)
        small, large = loss_of(planned, batch(lengths[0])), loss_of(planned, batch(lengths[-1]))
        small.backward()
        large.backward()
        results.append(state(planned))
    assert same(*results)


def test_every_signature_keeps_the_budget_safe_and_settled(trained):
    model, _, batch, lengths = trained
    handle = handle_of(model)
    budget_bytes = handle.plan.budget_bytes
    for length in lengths:
        work = Workload(model=model, inputs=batch(length))
        key = handle._reader.of_batch(work.inputs)
        handle.wait()
        if handle.statuses.get(key) != "profiled":
            handle._book._entries.pop(key, None)
            held = held_back(handle)
            assert planner.measure(work, repeats=1).peak_bytes <= budget_bytes, "safe"
            assert handle.statuses[key] == "safe" and handle.promised[key]
            release(handle, held)
            assert handle.statuses[key] in ("interpolated", "extrapolated", "covered")
        assert handle.promised[key]
        measured = planner.measure(work, repeats=1)
        assert measured.peak_bytes <= handle.plan.predicted_peak_bytes <= budget_bytes


def held_back(handle: DynamicHandle) -> list[Callable[[], None]]:
    """Keep jobs from the thread."""
    held: list[Callable[[], None]] = []
    handle._book.background.submit = held.append  # type: ignore[method-assign]
    return held


def release(handle: DynamicHandle, held: list[Callable[[], None]]) -> None:
    del handle._book.background.submit
    for job in held:
        handle._book.background.submit(job)
    assert handle.wait(60)


# A small model for what does not depend on the architecture ---------------------------------------------------------


def layers(count: int = 4, width: int = 16) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Tanh()) for _ in range(count)))


def rows(count: int, width: int = 16) -> Tensor:
    return torch.randn(count, width)


def planned(
    sizes: tuple[int, ...] = (64, 256), budget: Any = "75%", **settings: Any
) -> tuple[nn.Module, DynamicHandle]:
    model = layers()
    examples = [rows(size) for size in sizes[:-1]]
    planner.auto_checkpoint(
        model, rows(sizes[-1]), budget=budget, loss=torch.mean, dynamic=True, sizes=examples, **settings
    )
    return model, handle_of(model)


def step(model: nn.Module, count: int) -> None:
    model(rows(count)).mean().backward()


def test_each_new_signature_is_solved_for_once_and_counted(monkeypatch):
    model, handle = planned()
    assert handle.solves == 2
    asked = []
    solve = plan_cache.solve
    monkeypatch.setattr(
        plan_cache, "solve", lambda profile, *rest, **more: asked.append(1) or solve(profile, *rest, **more)
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


def test_what_is_covered_by_a_size_of_which_nothing_is_promised_has_no_promise_either():
    model, handle = planned(sizes=(64, 256))
    with pytest.warns(RuntimeWarning, match="profile_now"):
        for count in (300, 290, 290):
            step(model, count)
            handle.wait()
    assert not handle.promised[handle.signature_of(rows(290))]
    handle.remove()


def test_every_plan_leaves_the_headroom_and_what_its_fit_may_be_off_by():
    model, handle = planned(sizes=(64, 256), budget="90%", headroom=1000)
    step(model, 128)
    handle.wait()
    peaks = {key.dims[0]: profile.unplanned_peak_bytes for key, profile in handle._book.profiled.items()}
    left = {key.dims[0]: plan.headroom_bytes for key, plan in handle.plans.items()}
    spare_bytes = -(-(peaks[256] - peaks[64]) // 1000)  # a thousandth of what the bytes grow by
    assert left == {64: 1000, 256: 1000, 128: 1000 + spare_bytes}
    handle.remove()


def test_no_plan_for_a_size_warns_with_the_smallest_budget_or_raises():
    # Sizes on a line are extrapolated; at some size no plan fits any more.
    for strict in (False, True):
        model, handle = planned(sizes=(64, 128, 256), strict=strict)
        step(model, 4000)
        handle.wait()
        with pytest.warns(RuntimeWarning, match=r"expected a budget of at least \d+ bytes"):
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


def test_an_error_on_the_thread_is_said_once_and_leaves_the_safe_plan(monkeypatch):
    model, handle = planned()

    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(plan_cache, "solve", broken)
    with pytest.warns(RuntimeWarning, match="KeyError") as caught:
        for count in (100, 110, 120):
            step(model, count)
            handle.wait()
        step(model, 100)
    assert len(caught) == 1
    assert handle.statuses[handle.signature_of(rows(100))] == "safe"
    handle.remove()


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


def test_remove_restores_the_model_and_ends_the_thread():
    model, handle = planned()
    for count in range(100, 130):
        step(model, count)
    handle.remove()
    handle.remove()
    assert not [thread for thread in threading.enumerate() if thread.name == "planner-plan-book"]
    assert planner.handle_of(model) is None
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(ValueError, match="removed"):
        handle.profile_now(rows(10))
    with planner.apply(model, handle.plan):
        step(model, 256)


def test_the_model_goes_although_nobody_removed_its_plans():
    model, handle = planned()
    step(model, 100)
    handle.wait()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_no_thread_holds_up_the_end_of_the_program():
    code = (
        "import torch, planner\n"
        "from tests.planner.test_dynamic import planned, step\n"
        "model, handle = planned()\n"
        "for count in range(65, 105): step(model, count)\n"
        "print('over')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "over" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_change_its_shapes_is_refused():
    with pytest.raises(ValueError, match="uncompiled"):
        planner.auto_checkpoint(torch.compile(layers()), rows(8), budget="90%", dynamic=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offload"):
        planned(offload="only")
    with pytest.raises(ValueError, match="dynamic=True"):
        planner.auto_checkpoint(layers(), rows(8), budget="90%", sizes=[rows(4)])
    with pytest.raises(planner.Infeasible):
        planned(budget=1000)
