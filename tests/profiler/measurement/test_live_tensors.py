"""What is alive at the highest moment: hand-computed on a small step, and held against the allocator on others."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import planner
from planner import zoo
from planner.runtime.applier import split_name
from profiler.measurement.meter import Mark, Place, step_memory_meter
from profiler.measurement.planned_probe import LiveTensorTracker, PeakSnapshot, PlannedProbe
from profiler.workload.snapshot import preserved
from profiler.workload.steps import first_step
from profiler.workload.workload import Workload
from tests.support.odd_models import workload
from tests.support.small_blocks import WIDTH


def peak_of(work: Workload, plan: planner.Plan | None = None, stages: list[str] | None = None) -> PeakSnapshot:
    names = [s.name for s in plan.stages if s.kind == "stage"] if plan else stages or []
    with preserved(work):
        first_step(work)
        meter = step_memory_meter(work)
        with (
            PlannedProbe(work, [split_name(name) for name in names]) as probe,
            LiveTensorTracker(work, probe, meter) as tracker,
            nullcontext() if plan is None else planner.apply(work.model, plan),
        ):
            return tracker.step()


class Doubled(nn.Module):
    """Makes 1 MiB that backward does not need, and then 2 MiB that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x + 1, x]) * self.weight


def test_a_peak_worked_out_by_hand() -> None:
    # Beside x (1 MiB), torch.cat's result (2 MiB), which is saved, and the output (2 MiB), which the loop holds, the
    # backward of the product makes 2 MiB, and then the weight's gradient of 4 bytes; the weight, the loss and its
    # gradient are 4 bytes each.
    mib = 2**20
    work = Workload(model=Doubled(), inputs=torch.ones(mib // 4), loss=lambda y: y.sum())
    found = peak_of(work)
    sizes = Counter[tuple[str, str]]()
    for s in found.storages:
        sizes[s.kind, s.op] += s.size_bytes
    assert sizes["parameter", ""] == 4
    assert sizes["batch", ""] == mib
    assert sizes["made in step", "aten.cat.default"] == 2 * mib
    assert sizes["made in step", "aten.mul.Tensor"] == 2 * mib + 2 * mib
    assert found.explained_bytes == 7 * mib + 4 * 4
    assert (found.op, found.mark) == ("aten.sum.dim_IntList", Mark("backward", Place("outside", 0)))
    assert found.before_bytes == found.explained_bytes - 4


def test_gradients_that_are_added_to_are_alive_throughout() -> None:
    # As above, and the gradient of 4 bytes of the steps before; that it is cleared is no part of the step.
    mib = 2**20
    work = Workload(model=Doubled(), inputs=torch.ones(mib // 4), loss=lambda y: y.sum(), accumulate=True)
    found = peak_of(work)
    assert found.explained_bytes == 7 * mib + 5 * 4
    assert (found.op, found.mark) == ("aten.sum.dim_IntList", Mark("backward", Place("outside", 0)))
    assert [s.size_bytes for s in found.storages if s.kind == "gradient"] == [4]


def test_gradients_are_named_after_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 8, bias=False))
    work = Workload(model=model, inputs=torch.ones(2, 64), loss=lambda y: y.sum())
    found = peak_of(work, stages=["0", "1"])
    gradients = {s.module: (s.size_bytes, s.op, s.made_in) for s in found.storages if s.kind == "gradient"}
    assert gradients["1.weight"] == (256 * 8 * 4, "aten.mm.default", Mark("backward", Place("stage", 1)))
    assert gradients["0.weight"] == (256 * 64 * 4, "aten.mm.default", Mark("backward", Place("stage", 0)))


class Masked(nn.Module):
    """Fills room that it has made, and looks at a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.empty_like(x)
        mask[1:].bernoulli_(0.5)
        return x * mask * self.weight


def test_what_only_makes_room_is_named_after_what_fills_it() -> None:
    found = peak_of(Workload(model=Masked(), inputs=torch.ones(1000), loss=lambda y: y.sum()))
    ops = {s.op for s in found.storages if s.size_bytes == 4000 and s.kind == "made in step"}
    assert "aten.bernoulli_.float" in ops
    assert not any("empty" in op for op in ops)


def test_what_was_there_before_and_is_not_known_is_not_counted_as_made() -> None:
    """A target that the loss holds: no op of the step made it, though ops return views of it."""
    target = torch.ones(1000)
    model = nn.Linear(1, 1)
    work = Workload(model=model, inputs=torch.ones(1000, 1), loss=lambda y: (y.view(-1) * target.view(-1)).sum())
    found = peak_of(work)
    assert not any(s.op.startswith("aten.view") for s in found.storages)
    assert found.before_bytes <= found.explained_bytes <= found.peak_bytes


def test_what_a_kernel_needs_for_itself_is_left_over() -> None:
    """The backward of a BatchNorm on the CPU needs a buffer of its input's size."""
    found = peak_of(workload("batchnorm"))
    assert found.op == "aten.native_batch_norm_backward.default"
    assert found.peak_bytes - found.explained_bytes >= 64 * WIDTH * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "dropout", "batchnorm", "skip", "in_place", "frozen", "tuple"])
def test_the_storages_are_those_that_the_allocator_counts(name: str) -> None:
    work = workload(name)
    found = peak_of(work)
    assert found.peak_bytes == planner.measure(work, repeats=1).peak_bytes
    assert found.before_bytes <= found.explained_bytes <= found.peak_bytes
    assert all("forward" not in module.__dict__ for module in work.model.modules())


@pytest.mark.slow
def test_a_plan_s_second_runs_are_told_from_gradients() -> None:
    work = zoo.build("gpt2", layers=3, batch=4, hidden=64, vocab=200)
    rules = [planner.Rule(modules="transformer.h.*.mlp.act"), planner.Rule(modules="transformer.h.1")]
    plan = planner.state(planner.profile(work, rules=rules), rules)
    assert {stage.decision for stage in plan.stages} >= {"selective", "recompute"}
    found = peak_of(work, plan)
    with planner.apply(work.model, plan):
        assert found.peak_bytes == planner.measure(work, repeats=1).peak_bytes
    scalars = 2 * 3 * 8  # numbers that the activations multiply by, wrapped in tensors below the ops
    assert found.before_bytes - scalars <= found.explained_bytes <= found.peak_bytes
    again = [s for s in found.storages if s.again]
    assert not any(s.kind == "gradient" or "backward" in s.op for s in again)
    assert all(s.made_in is not None and s.made_in.phase in ("backward", "again") for s in again)
