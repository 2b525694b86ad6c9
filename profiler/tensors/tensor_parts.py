"""What tensors of other layouts (sparse, nested, wrapped ones) are made of: dense tensors, to be read and written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from profiler.tensors.local_tensors import local_part, wait_for_results

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """The dense tensors that a tensor of any layout is made of, here; writing into them changes it."""
    tensor = local_part(wait_for_results(tensor))
    with torch._C.DisableTorchFunctionSubclass():
        if inner := wrapped_in(tensor):
            return [part for _, attribute in inner for part in parts_of(attribute)]
        if not has_values(tensor):
            return []
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in _COMPRESSED:
            return [getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]]
        return tensor.detach().unbind() if tensor.is_nested else [tensor.detach()]


def wrapped_in(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors that a subclass wraps (a jagged one, a distributed one), by the names of its attributes."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    # What a jagged tensor has found out about itself stands there under names of no attributes.
    names = [name for name in tensor.__tensor_flatten__()[0] if name in vars(tensor)]
    return [(name, getattr(tensor, name)) for name in names]


def context_of(tensor: Any) -> Any:
    """What a subclass that wraps tensors says of itself besides them."""
    return tensor.__tensor_flatten__()[1]


def has_values(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta


def is_dense(tensor: Tensor) -> bool:
    """Whether its values simply lie in its storage, one after another."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def sizes_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape in plain numbers; of a nested tensor how many it holds, and the numbers in all of them."""
    return (tensor.size(0), tensor.numel()) if tensor.is_nested else tuple(tensor.shape)
