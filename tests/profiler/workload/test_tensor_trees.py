"""Nested arguments and outputs: looking at them leaves nothing behind; caches of types keep none of them."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import planner
from profiler.workload.tensor_trees import (
    cached_by_identity,
    map_tensors,
    opaque_holder,
    tensors_in,
    with_tensors,
    without_tensors,
)

Pair = namedtuple("Pair", ["left", "right"])


class Slotted:
    __slots__ = ("__hidden", "empty", "x")

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.__hidden = x, [x]


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Unmeasurable(tuple[Any, ...]):
    def __len__(self) -> int:
        raise NotImplementedError


class Store:
    """Refers to what it is a part of, as those of graphs do."""

    def __init__(self, parent: Any, x: torch.Tensor) -> None:
        self.parent, self.values = weakref.ref(parent), {"x": x}


class Graph:
    def __init__(self, x: torch.Tensor) -> None:
        self.store = Store(self, x)


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tuple": lambda t: (t, 1),
    "dict": lambda t: {"x": t},
    "named tuple": lambda t: Pair(t, None),
    "ordered dict": lambda t: OrderedDict(x=t),
    "default dict": lambda t: defaultdict(list, x=[t]),
    "deque": lambda t: deque([t]),
    "model output": lambda t: CausalLMOutput(loss=None, logits=t, hidden_states=(t,)),  # type: ignore[arg-type]
    "object": lambda t: SimpleNamespace(x=t, name="x"),
    "object with slots": Slotted,
    "dict of its own": lambda t: Attributes(x=t),
    "tuple of its own": lambda t: Unmeasurable((t, 1)),
    "objects in objects": Graph,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_tree_goes_when_its_holder_does(name: str) -> None:
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    tree = CONTAINERS[name](tensor)
    gc.disable()  # No cycles: a cycle would hold a step's memory until the next collection.
    try:
        assert all(each is tensor for each in tensors_in(tree)) and tensors_in(tree)
        doubled = map_tensors(lambda t: t * 2, tree)
        assert type(doubled) is type(tree)
        assert [each.tolist() for each in tensors_in(doubled)] == [[2.0] * 3] * len(tensors_in(tree))
        del tree, tensor
        assert gone() is None
    finally:
        gc.enable()


def test_an_object_that_stands_twice_is_made_anew_once() -> None:
    held = SimpleNamespace(x=torch.ones(2))
    held.itself = held
    tree = {"first": held, "second": [held]}
    assert len(tensors_in(tree)) == 1
    made = with_tensors(without_tensors(tree), [torch.zeros(2)])
    assert made["first"] is made["second"][0] is made["first"].itself is not held
    assert made["first"].x.sum() == 0 and held.x.sum() == 2


def test_a_part_of_a_copy_refers_to_the_copy() -> None:
    graph = Graph(torch.ones(2))
    made = map_tensors(torch.neg, graph)
    assert made.store.parent() is made and graph.store.parent() is graph


def test_objects_without_tensors_are_the_very_same() -> None:
    plain = SimpleNamespace(names=["a"], inner=SimpleNamespace(number=1))
    assert map_tensors(torch.neg, [plain])[0] is plain


def test_tensors_out_of_sight_are_told() -> None:
    assert opaque_holder((SimpleNamespace(x=torch.ones(2)), 1)) == ""
    assert opaque_holder([SimpleNamespace(x={torch.ones(2)})]) == "SimpleNamespace"


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
