"""Blocks that pass objects with tensors: found as stages, exact, and within what was promised."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner


class Field:
    """As a library of fields or sparse tensors has."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Store:
    def __init__(self, parent: Any, x: Tensor) -> None:
        self.parent, self.values = weakref.ref(parent), {"x": x}


class Graph:
    """Its tensors are in a part that refers to it, as in graphs of PyG."""

    def __init__(self, x: Tensor) -> None:
        self.store = Store(self, x)

    @property
    def x(self) -> Tensor:
        parent: Any = self.store.parent()
        return parent.store.values["x"]

    @x.setter
    def x(self, value: Tensor) -> None:
        self.store.values["x"] = value


def new(holder: Any, y: Tensor) -> Any:
    return type(holder)(y)


def changed(holder: Any, y: Tensor) -> Any:
    holder.x = y
    return holder


def tensor(holder: Any, y: Tensor) -> Any:
    return y


class Block(nn.Module):
    def __init__(self, returned: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.2)
        self.returned = returned

    def forward(self, holder: Any) -> Any:
        return self.returned(holder, holder.x + self.drop(self.b(torch.nn.functional.gelu(self.a(holder.x)))))


class Net(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any], returned: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(returned) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        holder = self.kind(x)
        for block in self.blocks:
            output = block(holder)
            if isinstance(output, Tensor):
                holder.x = output
            else:
                holder = output
        return holder.x


def losses(work: planner.Workload) -> list[float]:
    optimizer = torch.optim.SGD(work.model.parameters(), 0.1)
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = work.model(work.inputs).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def build(kind: Callable[[Tensor], Any], returned: Callable[[Any, Tensor], Any]) -> planner.Workload:
    torch.manual_seed(0)
    return planner.Workload(model=Net(kind, returned), inputs=torch.randn(500, 32), loss=lambda y: y.square().mean())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "returned"), [(Field, new), (Field, changed), (Field, tensor), (Graph, changed)])
def test_they_are_stages_that_run_again_exactly(kind: Callable[[Tensor], Any], returned: Any) -> None:
    work = build(kind, returned)
    profile = planner.profile(work, menus=False)
    assert [stage.name for stage in profile.stages if stage.recomputable] == [f"blocks.{k}" for k in range(5)]
    assert not profile.left_out
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(profile, 1, solver="rotor")
    least = refusal.value.minimum_budget_bytes
    assert least < profile.unplanned_peak_bytes / 2
    plan = planner.solve(profile, least, solver="rotor")
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes <= least
        planned = losses(work)
    assert planned == losses(build(kind, returned))


@pytest.mark.slow
def test_a_block_that_fills_an_object_which_others_hold_is_no_stage() -> None:
    def filled(holder: Any, y: Tensor) -> Tensor:
        holder.seen = [*getattr(holder, "seen", ()), y * 2]
        return y

    (record,) = planner.profile(build(Field, filled), menus=False).left_out
    assert record.module_class == "Block" and "puts tensors into a Field" in record.reason
