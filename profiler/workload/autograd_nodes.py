"""The sequence numbers of autograd nodes, the nodes of the graph behind a loss, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from profiler.tensors.identity_cache import cached_by_identity
from profiler.tensors.tensor_trees import tensors_in


def next_node() -> int:
    """The sequence number that the next autograd node of this thread will get."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]  # The stubs lack the submodule.


def graph_nodes(loss: Tensor) -> Iterator[Any]:
    """Every node that the backward of ``loss`` can reach."""
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)
    seen.clear()


def kept_by_nodes(outputs: list[Tensor]) -> list[Tensor]:
    """Tensors that the nodes of a graph still keep: those go with the last tensor of the graph, not with backward.

    They are in attributes (``ctx.x = x`` in a function of the user's own), were saved for a backward that did not come
    this way (of outputs that have no part in the loss), or are leaves that forward made, with their gradients.
    """
    nodes = list(dict.fromkeys(output.grad_fn for output in outputs if output.grad_fn is not None))
    seen = set(nodes)
    found: list[Tensor] = []
    while nodes:
        node = nodes.pop()
        found += tensors_in([getattr(node, "__dict__", {}), *_still_saved(node), *_leaf_of(node)])
        following = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= following
        nodes += following
    return found


def _still_saved(node: Any) -> list[Any]:
    """What autograd holds for a node's backward, as hooks have packed it; nothing once that has been."""
    try:
        values = [getattr(node, name) for name in _saved_by(type(node))]
    except RuntimeError:  # Of a function of the user's own, after its backward.
        return []
    return [one.data for value in values for one in (value if isinstance(value, tuple) else (value,))]


def _leaf_of(node: Any) -> list[Any]:
    """The leaf whose gradient a node adds up, and that gradient; none of a parameter's, which others know."""
    leaf = getattr(node, "variable", None)
    return [leaf, leaf.grad] if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else []


@cached_by_identity
def _saved_by(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
