"""Geometry: how a tensor lies in its storage, so that the same view can be taken of that storage made again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Size, stride, offset, dtype, and whether it is read as its conjugate, or as its negative.
Geometry = tuple[Any, Any, Any, torch.dtype, bool, bool]


def geometry_of(tensor: Tensor) -> Geometry:
    """How a strided tensor lies in its storage."""
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    return size, stride, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def view_of(root: Tensor, geometry: Geometry) -> Tensor:
    """The tensor that lies so in the storage of ``root``."""
    size, stride, offset, dtype, conjugate, negative = geometry
    if root.dtype != dtype:
        return over(root.untyped_storage(), geometry)
    if root.size() == size and root.stride() == stride and root.storage_offset() == offset:
        plain = root.detach()
    else:
        plain = root.as_strided(size, stride, offset)
    return _read_as(plain, conjugate, negative)


def over(storage: torch.UntypedStorage, geometry: Geometry) -> Tensor:
    """The tensor that lies so in a storage."""
    size, stride, offset, dtype, conjugate, negative = geometry
    whole = torch.empty(0, dtype=dtype, device=storage.device)
    return _read_as(whole.set_(storage, offset, size, stride), conjugate, negative)


def _read_as(tensor: Tensor, conjugate: bool, negative: bool) -> Tensor:
    if tensor.is_conj() != conjugate:
        tensor = torch._conj(tensor)
    return tensor if tensor.is_neg() == negative else torch._neg_view(tensor)
