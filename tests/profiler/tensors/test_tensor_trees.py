"""Nested arguments and outputs: looking at them leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from profiler.tensors.tensor_trees import map_tensors, opaque_holder, tensors_in, with_tensors, without_tensors

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
