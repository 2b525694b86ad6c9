"""Caches of types that keep none of them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

import planner
from profiler.tensors.identity_cache import cached_by_identity


def test_it_is_called_once_for_each_and_forgets_those_that_are_gone() -> None:
    called: list[str] = []

    @cached_by_identity
    def name_of(kind: type) -> str:
        called.append(kind.__name__)
        return kind.__name__

    def here() -> weakref.ref[Any]:
        class Here:
            pass

        assert name_of(Here) == name_of(Here) == "Here"
        return weakref.ref(Here)

    gone = here()
    gc.collect()
    assert gone() is None
    assert name_of(int) == name_of(int) == "int"
    assert called == ["Here", "int"]


def test_a_model_whose_class_is_made_in_a_function_is_gone_with_it() -> None:
    def planned() -> list[weakref.ref[Any]]:
        class Batch:
            def __init__(self, x: Tensor) -> None:
                self.x = x

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                return gradients[0] * 2

        class Local(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(
                    *[nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in "ab"]
                )

            def forward(self, batch: Batch) -> Tensor:
                return Scaled.apply(self.layers(batch.x))  # type: ignore[return-value]

        work = planner.Workload(Local(), (Batch(torch.randn(64, 8)),), loss=lambda y: y.square().mean())
        plan = planner.solve(planner.profile(work), "100%")
        with planner.apply(work.model, plan):
            work.step()
        return [weakref.ref(each) for each in (Batch, Scaled, Local)]

    gone = planned()
    for _ in range(3):
        gc.collect()
    assert [reference() for reference in gone] == [None] * 3
