"""Tensors as they are before a first run: values, copied to memory that the allocator does not count, and parameters.

A recomputation is refused where the values of a parameter have changed.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from profiler.recomputation.saved_tensors import PLAIN_TENSORS, RerunError, tensor_over, version_of
from profiler.workload.tensor_parts import storage_key

# Larger tensors that no run was seen to change are not copied in case that one does.
MOST_COPIED_BYTES = 16 * 2**20
# A view that skips most of its storage is not worth copying: what lies between comes along.
_MOST_SPREAD = 2
# Up to here tensors are compared with their copies, which takes some 90 microseconds then.
MOST_COMPARED_BYTES = 2**20


def uncounted_copy(tensor: Tensor, most_spread: float = _MOST_SPREAD) -> UncountedCopy | None:
    """Copies a tensor's values to host memory; returns None for a tensor that is not plain and strided.

    Args:
        tensor: the tensor to copy.
        most_spread: the most elements of its storage from its first to its last one, as a multiple of its own.
    """
    if isinstance(tensor, FakeTensor):  # Of a simulated device: there are no values to copy.
        return UncountedCopy(tensor, 0)
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    count, span = tensor.numel(), _span(tensor)
    if count == 0:
        return UncountedCopy(tensor, 0)
    return UncountedCopy(tensor, span) if span <= most_spread * count and _has_memory(tensor, span) else None


class UncountedCopy:
    """The values of a plain tensor, and its place in its storage.

    From a GPU it is copied into page-locked memory in the order of the current stream, without waiting for it.

    Args:
        tensor: a strided one.
        span: the number of elements of its storage from its first one to its last one.
    """

    __slots__ = ("_dtype", "_size", "_stride", "_values")

    def __init__(self, tensor: Tensor, span: int) -> None:
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._values: bytes | Tensor
        if tensor.is_cpu:  # Not by ``tensor.numpy()``: a storage that numpy has seen can never be resized again.
            size_bytes = span * tensor.itemsize
            self._values = ctypes.string_at(tensor.data_ptr(), size_bytes) if span else b""
        else:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                flat = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
                self._values = torch.empty((span,), dtype=self._dtype, pin_memory=True).copy_(flat, non_blocking=True)

    def on(self, device: torch.device) -> Tensor:
        """A tensor like the copied one, on a device."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            if isinstance(self._values, Tensor):
                flat = self._values
            elif self._values:
                flat = torch.from_numpy(np.frombuffer(self._values, np.uint8).copy()).view(self._dtype)
            else:
                flat = torch.empty(0, dtype=self._dtype)
            return flat.to(device, non_blocking=True).as_strided(self._size, self._stride)

    def other_than(self, tensor: Tensor) -> bool:
        """Whether a tensor holds something else now, as far as that is cheap to say: it is small and on the CPU."""
        if not isinstance(self._values, bytes) or len(self._values) > MOST_COMPARED_BYTES:
            return False
        if (tensor.size(), tensor.stride(), tensor.dtype) != (self._size, self._stride, self._dtype):
            return True
        if not tensor.is_cpu or not _has_memory(tensor, _span(tensor)):
            return True
        return bool(self._values) and ctypes.string_at(tensor.data_ptr(), len(self._values)) != self._values

    def put_back(self, tensor: Tensor) -> None:
        """Write the values into a tensor, resized where it has another shape now; its version stays as it was."""
        lies = tensor.size(), tensor.stride(), tensor.dtype
        same = lies == (self._size, self._stride, self._dtype) and tensor.is_cpu
        if same and isinstance(self._values, bytes) and _has_memory(tensor, _span(tensor)):
            if self._values:
                ctypes.memmove(tensor.data_ptr(), self._values, len(self._values))
            return
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            values = self.on(tensor.device)
            if (tensor.shape, tensor.dtype) == (self._size, self._dtype):
                tensor.data.copy_(values, non_blocking=True)
            else:
                tensor.data = values.clone()  # Numpy's memory could not be resized again.


def _has_memory(tensor: Tensor, span: int) -> bool:
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + span) * tensor.itemsize


def _span(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


_COPIES: dict[int, tuple[weakref.ref[Tensor], int, int, UncountedCopy | None]] = {}


def copy_of_version(tensor: Tensor) -> UncountedCopy | None:
    """A copy of a tensor's values, the same one as long as its version stays; None where none is made."""
    key, version, storage = id(tensor), version_of(tensor), storage_key(tensor)
    known = _COPIES.get(key)
    if known is not None and known[0]() is tensor and known[1:3] == (version, storage):
        copied = known[3]
        if copied is None or not copied.other_than(tensor):
            return copied
    small = tensor.grad_fn is None and tensor.numel() * tensor.element_size() <= MOST_COPIED_BYTES
    # A large one that has changed before is copied all the same.
    copied = uncounted_copy(tensor) if small or (known is not None and known[0]() is tensor) else None
    _COPIES[key] = weakref.ref(tensor, lambda _: _COPIES.pop(key, None)), version, storage, copied
    return copied


class RememberedParameter(NamedTuple):
    """A parameter with its version, whether it takes a gradient, and where its values lie."""

    parameter: Tensor
    version: int
    takes_gradient: bool
    storage: torch.UntypedStorage | None
    offset: int
    stride: tuple[int, ...]

    def thawed(self) -> bool:
        """Whether it takes a gradient now and did not, or the reverse."""
        return self.parameter.is_leaf and self.parameter.requires_grad is not self.takes_gradient

    def moved(self) -> bool:
        """Whether its ``.data`` was replaced since."""
        return self.storage is not None and storage_key(self.parameter) != self.storage._cdata

    def data(self) -> Tensor:
        """Returns its former ``.data``; raises RerunError where that had another size or type."""
        size, dtype = self.parameter.size(), self.parameter.dtype
        span = self.offset + 1 + sum((n - 1) * stride for n, stride in zip(size, self.stride, strict=True))
        assert self.storage is not None
        if span * dtype.itemsize > self.storage.nbytes():
            raise RerunError("a parameter has another shape or type than in forward; change it after backward")
        return tensor_over(self.storage, (size, self.stride, self.offset, dtype, False, False))


class RememberedParameters:
    """Records parameters as they are now. Plain ones are read and compared in bulk, which is much faster.

    Args:
        parameters: the parameters of the modules of a stage.
    """

    __slots__ = ("_lies", "_others", "_plain", "_storages", "_taking", "_versions")

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._plain = plain = [p for p in parameters if _is_plain(p)]
        self._versions = [p._version for p in plain]
        self._taking = [p.requires_grad for p in plain]
        self._storages = [p.untyped_storage() for p in plain]
        self._lies: list[Any] = [(p.storage_offset(), p.stride()) for p in plain]
        self._others = (
            []
            if len(plain) == len(parameters)
            else [
                RememberedParameter(p, version_of(p), p.requires_grad, None, 0, ())
                for p in parameters
                if not _is_plain(p)
            ]
        )

    def changed(self) -> list[RememberedParameter]:
        """Returns the parameters that have changed since, or may have."""
        plain, storages = self._plain, self._storages
        if (
            [p._version for p in plain] == self._versions
            and [p.requires_grad for p in plain] == self._taking
            and [p.untyped_storage()._cdata for p in plain] == [storage._cdata for storage in storages]
            and all(storage.nbytes() for storage in storages)
        ):
            return self._others
        return [*self._others, *map(self._remembered, range(len(plain)))]

    def set_since(self) -> list[tuple[Tensor, int]]:
        """Returns the parameters whose values were set in place since, with the versions before."""
        plain = [(p, version) for p, version in zip(self._plain, self._versions, strict=True) if p._version != version]
        return plain + [
            (one.parameter, one.version) for one in self._others if version_of(one.parameter) != one.version
        ]

    def accept(self, parameter: Tensor) -> None:
        """Remembers the values that a parameter was set to since."""
        pairs = zip(self._plain, self._versions, strict=True)
        self._versions = [p._version if p is parameter else version for p, version in pairs]
        self._others = [
            one._replace(version=version_of(parameter)) if one.parameter is parameter else one for one in self._others
        ]

    def _remembered(self, k: int) -> RememberedParameter:
        return RememberedParameter(
            self._plain[k], self._versions[k], self._taking[k], self._storages[k], *self._lies[k]
        )


def _is_plain(parameter: Tensor) -> bool:
    """Whether its memory is all that it is."""
    return type(parameter) is nn.Parameter and parameter.layout is torch.strided and not parameter.is_inference()
