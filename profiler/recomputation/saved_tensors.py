"""Held tensors: what recorded ops read that nobody makes again, held by the record or by somebody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from profiler.recomputation.module_rerun import RerunError

_VIEWS = torch._C.DispatchKey.ADInplaceOrView


class TensorHolder(Protocol):
    """Holds a tensor for a tape."""

    def tensor(self) -> Tensor:
        """The tensor."""
        ...


class RecordedInput:
    """In an op's recorded arguments: a tensor that is alive anyway, kept for this op, or held by somebody else."""

    __slots__ = ("_holder", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = _cut_off(tensor)
        self._version = version_of(tensor)
        self._holder: TensorHolder | None = None

    def hand_over(self, holder_of: Callable[[Tensor], TensorHolder]) -> None:
        """Let somebody else hold it, unless it was changed since."""
        if self._tensor is not None and version_of(self._tensor) == self._version:
            self._holder, self._tensor = holder_of(self._tensor), None

    def tensor(self) -> Tensor:
        """The tensor; raises RerunError where it was changed in place since the op read it."""
        if self._tensor is None:
            assert self._holder is not None
            return self._holder.tensor()
        if version_of(self._tensor) != self._version:
            raise RerunError(
                "expected a tensor that a recomputed op reads to be as it was in forward, got one that was changed in "
                "place since; change a copy, or leave this stage out of the plan"
            )
        return self._tensor


def recorded_inputs_in(value: Any) -> Iterator[RecordedInput]:
    """The held tensors among an op's recorded arguments."""
    if isinstance(value, RecordedInput):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from recorded_inputs_in(item)
    elif isinstance(value, dict):
        yield from recorded_inputs_in(list(value.values()))


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return -1 if tensor.is_inference() else tensor._version  # Inference tensors count no changes.


def _cut_off(tensor: Tensor) -> Tensor:
    """The tensor without its graph, sharing its version counter; for use inside a dispatch mode.

    There torch leaves out the layer that makes a detached tensor share the counter.
    """
    without = torch._C._dispatch_tls_is_dispatch_key_excluded(_VIEWS)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS, without)


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
        return tensor_over(root.untyped_storage(), geometry)
    if root.size() == size and root.stride() == stride and root.storage_offset() == offset:
        plain = root.detach()
    else:
        plain = root.as_strided(size, stride, offset)
    return _read_as(plain, conjugate, negative)


def tensor_over(storage: torch.UntypedStorage, geometry: Geometry) -> Tensor:
    """The tensor that lies so in a storage."""
    size, stride, offset, dtype, conjugate, negative = geometry
    whole = torch.empty(0, dtype=dtype, device=storage.device)
    return _read_as(whole.set_(storage, offset, size, stride), conjugate, negative)


def _read_as(tensor: Tensor, conjugate: bool, negative: bool) -> Tensor:
    if tensor.is_conj() != conjugate:
        tensor = torch._conj(tensor)
    return tensor if tensor.is_neg() == negative else torch._neg_view(tensor)
