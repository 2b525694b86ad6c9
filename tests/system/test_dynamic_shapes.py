"""Batches of changing shapes: exact under every plan, and within the budget."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner import zoo
from profiler.workload.workload import Workload
from tests.support.dynamic_layers import handle_of, held_back, release, same, state
from tests.support.nightly import by_day

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


@pytest.fixture(scope="module", params=by_day(SETTINGS, ["bert"]))
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


def loss_of(model: nn.Module, inputs: Any) -> Tensor:
    output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return output if isinstance(output, Tensor) else output.loss


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
