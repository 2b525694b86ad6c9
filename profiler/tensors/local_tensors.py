"""Distributed tensors: which they are, and the tensor of this process that holds what they keep here."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from profiler.tensors.tensor_trees import tensors_in

# By the module that defines them, which is not imported for this: the attribute with this process's tensor.
_HOLDERS = (
    ("torch.distributed.tensor", "DTensor", "_local_tensor"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "elem"),
)
# The namespace of the ops that distributed tensors are exchanged with.
COLLECTIVES = "_c10d_functional"
_PLAIN = (Tensor, nn.Parameter)


def local_part(tensor: Tensor) -> Tensor:
    """The tensor whose storage holds a distributed tensor's values in this process; any other tensor is its own.

    A ``DTensor`` has the shape of the whole, and a storage that holds nothing; a result of a collective that is under
    way is not waited for.
    """
    while type(tensor) not in _PLAIN and (name := _attribute_of(type(tensor))):
        tensor = getattr(tensor, name)
    return tensor


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a part of one that several processes hold, or comes from a collective that is under way."""
    return type(tensor) not in _PLAIN and bool(_attribute_of(type(tensor)))


def any_distributed(types: Iterable[type]) -> bool:
    """Whether an op with arguments of these types is one of distributed tensors.

    A dispatch mode returns ``NotImplemented`` for it: what it does to this process's tensors then comes to the mode op
    by op, its collectives among them.
    """
    return any(_attribute_of(kind) for kind in types)


def collectives_under_way() -> int:
    """How many collectives have begun, whose results nobody has waited for."""
    bindings: Any = torch._C
    return bindings._distributed_c10d._get_work_registry_size() if may_communicate() else 0


def wait_for_results(tree: Any) -> Any:
    """The same tree, once collectives that tensors in it come from are over: dropped before, they would never end."""
    if collectives_under_way():
        for tensor in tensors_in(tree):
            while type(tensor) not in _PLAIN and (name := _attribute_of(type(tensor))):
                if name == "elem":
                    tensor.wait()  # pyright: ignore[reportAttributeAccessIssue]
                tensor = getattr(tensor, name)
    return tree


def may_communicate() -> bool:
    """Whether collectives may run in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _attribute_of(kind: type) -> str:
    for module, name, attribute in _HOLDERS:
        defined: Any = sys.modules.get(module)
        if defined is not None and issubclass(kind, getattr(defined, name)):
            return attribute
    return ""
