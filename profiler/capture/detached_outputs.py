"""Outputs of a forward that no loss uses, such as logits beside a loss that the model has computed itself.

AOTAutograd hands zeros as large as they are to backward in place of their gradients; autograd by itself hands nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from profiler.tensors.storages import storage_key
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.compiled_forwards import Forward
from profiler.workload.forward_patches import ForwardPatches
from profiler.workload.workload import Workload


def unused_outputs(workload: Workload) -> tuple[int, ...]:
    """The places of those outputs, among the leaves of what forward returns in a step; the step runs once.

    Those that share their storage with a parameter, an input or another output are left out: AOTAutograd makes a view
    that was detached from what it shares, and may make another view of it.
    """
    given: set[int] = set()
    used: set[int] = set()

    def watched_leaf(place: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        given.add(place)
        outside = leaf.view_as(leaf)  # The forward itself may have gone on with the leaf.
        outside.register_hook(lambda _: used.add(place))
        return outside

    def watched(plain: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten(plain(*args, **kwargs))
            there = Counter(map(storage_key, tensors_in((args, kwargs, leaves, [*workload.model.parameters()]))))
            alone = {k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and there[storage_key(leaf)] == 1}
            leaves = [watched_leaf(k, leaf) if k in alone else leaf for k, leaf in enumerate(leaves)]
            return pytree.tree_unflatten(leaves, spec)

        return run

    patches = ForwardPatches()
    patches.wrap(workload.model, watched)
    try:
        workload.step()
    finally:
        patches.remove()
    return tuple(sorted(given - used))


def without_gradients(forward: Forward, places: Collection[int]) -> Forward:
    """A forward some of whose outputs need no gradient."""
    if not places:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten(forward(*args, **kwargs))
        return pytree.tree_unflatten([leaf.detach() if k in places else leaf for k, leaf in enumerate(leaves)], spec)

    return run


def refusing_gradients(output: Any, places: Collection[int], error: Callable[[], Exception]) -> Any:
    """What forward returned, such that a backward from one of its leaves raises an error.

    Args:
        output: of the forward, whose leaves in these places need no gradient.
        places: of those leaves.
        error: makes what is raised.
    """
    if not places:
        return output
    leaves, spec = pytree.tree_flatten(output)
    anchor = torch.empty(0, requires_grad=True)
    leaves = [_refusing(leaf, anchor, error) if k in places else leaf for k, leaf in enumerate(leaves)]
    return pytree.tree_unflatten(leaves, spec)


def _refusing(leaf: Tensor, anchor: Tensor, error: Callable[[], Exception]) -> Tensor:
    with _unsafe_preserve_version_counter(leaf):  # Backward may have saved it, and nothing has changed it.
        return _Refusing.apply(leaf, anchor, error)


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, _: Tensor, error: Callable[[], Exception]) -> Tensor:
        ctx.error = error
        if value._is_view():
            return value.view_as(value)
        ctx.mark_dirty(value)  # No view: what a custom function returns as a view must not be changed in place.
        return value

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise ctx.error()
