"""The joint graph of a call: its ops come in order, and it computes what the module computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from planner import zoo
from profiler.trace.captured_call import capture_call
from profiler.trace.joint_graph import storages_of

SMALL: dict[str, dict[str, Any]] = {
    "t5": {"layers": 1, "hidden": 32, "seq": 16, "vocab": 200},
    "resnet50": {"batch": 4, "hidden": 8, "image": 32},
    "densenet": {"batch": 2, "layers": 2, "hidden": 8, "image": 16},
    "mlp": {"layers": 3, "hidden": 16, "batch": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_ops_come_in_order_and_an_output_needs_each(name: str) -> None:
    work = zoo.build(name, **SMALL[name])
    work.step()  # Libraries note things on their models in the first one.
    args, kwargs = ((), work.inputs) if isinstance(work.inputs, dict) else ((work.inputs,), {})
    graph = capture_call(work.model, work.model.forward, args, kwargs).graph
    seen: set[fx.Node] = {*graph.inputs, *graph.tangents, *graph.constants}
    for op in graph.ops:
        assert seen.issuperset(op.all_input_nodes)
        seen.add(op)
    assert seen.issuperset(output for output in graph.outputs if isinstance(output, fx.Node))
    assert any(storages_of(op) for op in graph.ops)


def test_it_computes_outputs_and_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(8, 16)
    graph = capture_call(model, model.forward, (x,), {}).graph
    output = model(x)
    gradient = torch.randn_like(output)
    values: dict[torch.Size, Tensor] = {each.shape: each.detach() for each in (x, *model.parameters())}
    arguments = [values[node.meta["val"].shape] for node in graph.inputs]
    made = pytree.tree_leaves(graph.module(arguments, [gradient]), is_leaf=lambda leaf: leaf is None)
    assert torch.equal(made[0], output)
    expected = torch.autograd.grad(output, list(model.parameters()), gradient)
    gradients = {each.shape: each for each in made[graph.forward_outputs :] if each is not None}
    assert all(torch.equal(gradients[each.shape], each) for each in expected)
