"""Dropout on the CPU as two ops: one draws the mask, the other applies it.

To draw takes several times as long there as to multiply. As two ops, what dropout made is made again of the mask, which
backward keeps anyway, and a mask is drawn again without what it is applied to. On CUDA one kernel does both in the time
of the multiplication, and stays one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from profiler.current_device import active_device

OWN_LIBRARY = "sublinear_planner"
_library = torch.library.Library(OWN_LIBRARY, "DEF")
_SEEDED = (torch.Tag.nondeterministic_seeded,)
_library.define("dropout_mask(SymInt[] size, SymInt[] stride, float keep) -> Tensor", tags=_SEEDED)
_library.define("masked_dropout(Tensor x, Tensor mask, float scale) -> Tensor")
MASK = torch.ops.sublinear_planner.dropout_mask.default
MASKED = torch.ops.sublinear_planner.masked_dropout.default


@torch.library.impl(_library, "dropout_mask", "CompositeExplicitAutograd")
def _draw(size: Sequence[int], stride: Sequence[int], keep: float) -> Tensor:
    return _empty_mask(size, stride).bernoulli_(keep)


def _empty_mask(size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(size, stride, dtype=torch.bool)


@torch.library.impl(_library, "masked_dropout", "CompositeExplicitAutograd")
def _apply(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    # Multiplied by the mask itself, x would lie beside a copy of the mask of its own type.
    return torch.empty_like(x).copy_(mask).mul_(x).mul_(scale)


@torch.library.register_fake(f"{OWN_LIBRARY}::dropout_mask", lib=_library)
def _(size: Sequence[int], stride: Sequence[int], keep: float) -> Tensor:
    return _empty_mask(size, stride)


@torch.library.register_fake(f"{OWN_LIBRARY}::masked_dropout", lib=_library)
def _(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return x.mul(mask)


def split_dropout(graph: fx.Graph) -> None:
    """Put the two ops in the place of each dropout on the CPU, with the arithmetic of torch's own kernels."""
    simulated = active_device()
    if simulated is not None and simulated.record.kind != "cpu":
        return
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout.default):
        x, rate, train = node.args
        dropped, mask = node.meta["val"]
        if dropped.device.type != "cpu" or train is False or not 0 < rate < 1:
            continue
        # Forward rounds the scale to the type of what it multiplies, backward does not.
        scale = torch.tensor(1 / (1 - rate), dtype=dropped.dtype).item()
        with graph.inserting_before(node):
            drawn = graph.call_function(MASK, (list(mask.shape), list(mask.stride()), 1 - rate))
            made = graph.call_function(MASKED, (x, drawn, scale))
        for new, value in ((made, dropped), (drawn, mask)):
            new.meta = {**node.meta, "val": value}
        for item in [user for user in node.users if user.target is operator.getitem]:
            item.replace_all_uses_with((made, drawn)[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.native_dropout_backward.default):
        if node.meta["val"].device.type == "cpu":
            node.target = MASKED
