"""Plans on models that were wrapped after the plan was made: the names mean the inner model, and results are equal."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

import planner
from profiler.workload.workload import Workload
from tests.support.odd_models import workload


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def planned() -> tuple[Workload, planner.Plan]:
    """A workload, and the plan with the smallest peak."""
    work = workload("plain")
    profile = planner.profile(work, menus=False)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1, solver="rotor")
    return work, planner.solve(profile, caught.value.minimum_budget_bytes, solver="rotor")


def gradients(work: Workload, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss = work.loss(model(work.inputs))  # type: ignore[misc]
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *[g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in grads]]


def assert_planned_step(work: Workload, plan: planner.Plan, wrapped: nn.Module) -> None:
    plain = gradients(work, copy.deepcopy(work.model))
    with planner.apply(wrapped, plan) as handle:
        assert planner.handle_of(wrapped) is handle
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(work, wrapped), plain, strict=True))
    assert planner.handle_of(wrapped) is None


@pytest.mark.slow
def test_a_plan_holds_in_distributed_data_parallel(one_process: None, planned: tuple[Workload, planner.Plan]) -> None:
    work, plan = planned
    wrapped = DistributedDataParallel(copy.deepcopy(work.model))
    assert_planned_step(work, plan, wrapped)
    profile = planner.profile(Workload(model=wrapped, inputs=work.inputs, loss=work.loss), menus=False)
    assert profile.model_class == plan.model_class
    assert [stage.name for stage in profile.stages if stage.kind == "stage"] == [
        stage.name for stage in plan.stages if stage.kind == "stage"
    ]
    assert_planned_step(work, planner.solve(profile, "80%", solver="rotor"), wrapped)


@pytest.mark.slow
def test_a_plan_holds_in_a_sharded_model(one_process: None, planned: tuple[Workload, planner.Plan]) -> None:
    work, plan = planned
    model = copy.deepcopy(work.model)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_planned_step(work, plan, model)
    segments = planner.solve(planner.profile(work, menus=False), "95%", solver="chen_sqrt")
    assert any(stage.decision == "segment" for stage in segments.stages)
    assert_planned_step(work, segments, model)


def prepare(model: Any) -> None:
    """What accelerate makes of a model's forward in mixed precision."""
    model._original_forward = model.forward
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)


@pytest.mark.slow
def test_a_plan_holds_where_accelerate_casts_inside() -> None:
    plain = workload("plain")
    work = Workload(model=plain.model, inputs=plain.inputs, loss=plain.loss, autocast="bfloat16")
    profile = planner.profile(work, menus=False)
    plan = planner.solve(profile, "80%", solver="rotor")
    prepared, other = copy.deepcopy(work.model), copy.deepcopy(work.model)
    prepare(prepared)
    prepare(other)
    with planner.apply(prepared, plan):
        planned = gradients(work, prepared)
    assert all(torch.equal(a, b) for a, b in zip(planned, gradients(work, other), strict=True))
    unprepared = copy.deepcopy(work.model)
    with planner.apply(unprepared, plan), pytest.raises(planner.errors.PlanMismatch, match="autocast bfloat16"):
        gradients(work, unprepared)


def test_a_plan_finds_a_compiled_model(planned: tuple[Workload, planner.Plan]) -> None:
    work, plan = planned
    wrapped = torch.compile(copy.deepcopy(work.model), backend="eager")
    with planner.apply(wrapped, plan) as handle:  # type: ignore[arg-type]
        assert planner.handle_of(wrapped) is handle  # type: ignore[arg-type]


def test_wrappers_that_no_plan_holds_in_are_refused(planned: tuple[Workload, planner.Plan]) -> None:
    work, plan = planned
    with pytest.raises(ValueError, match="it copies the model for every step; use DistributedDataParallel"):
        planner.apply(DataParallel(work.model), plan)
