"""Plans on compiled models: the same bits as the compiled model without a plan, and the bytes that were predicted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import planner
from profiler.workload import Workload
from tests.odd_models import Stack, workload

BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole_by_method(work: Workload, **options: Any) -> None:
    work.model.compile(backend=BACKEND, **options)


def whole_by_wrapping(work: Workload, **options: Any) -> None:
    work.model = torch.compile(work.model, backend=BACKEND, **options)  # type: ignore[assignment]


def blocks_by_method(work: Workload, **options: Any) -> None:
    for block in blocks_of(work):
        block.compile(backend=BACKEND, **options)


def blocks_by_wrapping(work: Workload, **options: Any) -> None:
    blocks = blocks_of(work)
    for k in range(len(blocks)):
        blocks[k] = torch.compile(blocks[k], backend=BACKEND, **options)  # type: ignore[assignment]


def blocks_by_forward(work: Workload, **options: Any) -> None:
    for block in blocks_of(work):
        block.forward = torch.compile(block.forward, backend=BACKEND, **options)


def blocks_of(work: Workload) -> nn.ModuleList:
    assert isinstance(work.model, Stack)
    return work.model.blocks  # type: ignore[return-value]


WAYS = [whole_by_method, whole_by_wrapping, blocks_by_method, blocks_by_wrapping, blocks_by_forward]


def smallest_plan(work: Workload, **settings: Any) -> planner.Plan:
    profile = planner.profile(work, **settings)
    return planner.solve(profile, smallest_budget(profile), solver="rotor")


def smallest_budget(profile: planner.Profile) -> int:
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1, solver="rotor")
    return caught.value.minimum_budget_bytes


def stage_plan(work: Workload) -> planner.Plan:
    """A plan of the uncompiled model that recomputes blocks as a whole."""
    return smallest_plan(work, menus=False, stages=["blocks.*"])


def state_after(work: Workload, steps: int = 2) -> dict[str, Any]:
    torch.manual_seed(7)
    losses = [work.step() for _ in range(steps)]
    return {
        "losses": losses,
        "gradients": [None if p.grad is None else p.grad.clone() for p in work.model.parameters()],
        "state": list(copy.deepcopy(work.model.state_dict()).values()),
        "random": torch.get_rng_state(),
    }


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


@pytest.mark.parametrize(
    ("name", "way"),
    [*(("dropout", way) for way in WAYS), ("batchnorm", whole_by_method), ("batchnorm", blocks_by_wrapping)],
)
def test_a_compiled_model_is_profiled_and_planned_as_it_runs(name: str, way: Callable[..., None]) -> None:
    expected, work = workload(name), workload(name)
    way(expected)
    way(work)
    profile = planner.profile(work)
    assert profile.precision.endswith("compiled")
    smallest = smallest_budget(profile)
    assert smallest < profile.unplanned_peak_bytes
    plain = state_after(expected)
    for budget in (smallest, (smallest + profile.unplanned_peak_bytes) // 2, profile.unplanned_peak_bytes):
        plan = planner.solve(profile, budget, solver="rotor")
        with planner.apply(work.model, plan), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes
    with planner.apply(work.model, planner.solve(profile, smallest, solver="rotor")):
        assert_same(state_after(work), plain)
