"""Nested arguments and outputs: looking at them leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from profiler.tensors.tensor_trees import map_tensors, tensors_in

Pair = namedtuple("Pair", ["left", "right"])
CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tuple": lambda t: (t, 1),
    "dict": lambda t: {"x": t},
    "named tuple": lambda t: Pair(t, None),
    "ordered dict": lambda t: OrderedDict(x=t),
    "default dict": lambda t: defaultdict(list, x=[t]),
    "deque": lambda t: deque([t]),
    "model output": lambda t: CausalLMOutput(loss=None, logits=t, hidden_states=(t,)),  # type: ignore[arg-type]
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
