"""Types that torch traces wrongly: norms on the CPU save the statistics of half-precision inputs as their weights are.

Seen in torch 2.13: fake tensors have the input's type there, whose storages are half as large.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten
STATISTICS = (1, 2)  # of a norm's results
# By norm the first of its arguments that may have another type: weight, bias, then running statistics.
_PARAMETERS: dict[Any, range] = {
    _aten.native_layer_norm.default: range(2, 4),
    _aten.native_group_norm.default: range(1, 3),
    _aten._native_batch_norm_legit.no_stats: range(1, 3),
    _aten._native_batch_norm_legit_functional.default: range(1, 5),
    _aten._native_batch_norm_legit_no_training.default: range(1, 5),
}


def correct_types(graph: fx.Graph) -> None:
    """Give the statistics of norms, and views of them, the types that they have when the ops run."""
    corrected: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _PARAMETERS:
            if _correct_norm(node):
                corrected.add(node)
        elif node.target is operator.getitem and node.args[0] in corrected:
            node.meta["val"] = node.args[0].meta["val"][node.args[1]]
            corrected.add(node)
        elif is_view(node) and not corrected.isdisjoint(node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            with node.meta["val"].fake_mode:
                node.meta["val"] = node.target(*args, **kwargs)
            corrected.add(node)


def _correct_norm(norm: fx.Node) -> bool:
    """Whether its statistics had the wrong type."""
    made = norm.meta["val"]
    saved: Tensor = made[STATISTICS[0]]
    given = [norm.args[k] for k in _PARAMETERS[norm.target]]
    types = [each.meta["val"].dtype for each in given if isinstance(each, fx.Node)]
    if saved.device.type != "cpu" or not types or saved.dtype == types[0]:
        return False
    norm.meta["val"] = tuple(_as_type(each, types[0]) if k in STATISTICS else each for k, each in enumerate(made))
    return True


def _as_type(value: FakeTensor, dtype: torch.dtype) -> Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


def is_view(node: fx.Node) -> bool:
    """Whether what a node makes is a view of what it reads."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
