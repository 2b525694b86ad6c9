"""The sequence numbers of autograd nodes, and the nodes of the graph behind a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


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
