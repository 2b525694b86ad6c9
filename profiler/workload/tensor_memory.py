"""A tensor of any kind remembered in host memory, and put back bit for bit into the very same tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from profiler.workload.tensor_parts import context_of, has_values, is_dense, parts_of, wrapped_in

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class TensorMemory:
    """The values of a tensor and its place in memory, without keeping it or its storage alive.

    Tensors without values (meta ones, parameters of lazy modules) are only known by their identity.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._device, self._takes_gradient = tensor.device, tensor.is_leaf and tensor.requires_grad
        self._type: Any = type(tensor)
        self._inner = [(name, TensorMemory(inner)) for name, inner in wrapped_in(tensor)]
        self._wrapping = (context_of(tensor), tensor.size(), tensor.stride()) if self._inner else ()
        self._values = None if self._inner or not has_values(tensor) else host_copy(tensor)
        self._placed = None if self._values is None else _Placement(tensor)

    def put_back(self, *, stays: bool = False) -> Tensor | None:
        """The tensor with its values written, or a new one where it is gone; None where it is gone for good.

        Args:
            stays: whether a tensor that lies elsewhere by now, in the same form, stays there.
        """
        tensor = self._tensor()
        if tensor is None:
            return self._anew().requires_grad_(self._takes_gradient) if self._values is not None else self._rewrapped()
        for name, inner in self._inner:
            before = inner.put_back(stays=stays)
            if before is not None and getattr(tensor, name) is not before:
                setattr(tensor, name, before)
        if self._values is not None and self._placed is not None:
            if not (self._placed.holds(tensor) or (stays and self._placed.fits(tensor))):
                tensor.data = self._placed.again(self._anew)
            _overwrite(tensor, self._values)
        if tensor.is_leaf and tensor.requires_grad is not self._takes_gradient:
            tensor.requires_grad_(self._takes_gradient)
        return tensor

    def _anew(self) -> Tensor:
        assert self._values is not None
        with torch._C.DisableTorchFunctionSubclass():
            # A copy of an mkldnn tensor can only be made by cloning it.
            copies = self._values.device == self._device
            made = self._values.clone() if copies else self._values.to(self._device)
            return made if self._type is Tensor else made.as_subclass(self._type)

    def _rewrapped(self) -> Tensor | None:
        inner = {name: memory.put_back() for name, memory in self._inner}
        return self._type.__tensor_unflatten__(inner, *self._wrapping) if inner else None


class _Placement:
    """The place of a tensor's values: its type, shape and, where it is dense, its storage."""

    def __init__(self, tensor: Tensor) -> None:
        self._device, self._dtype, self._form = tensor.device, tensor.dtype, _form(tensor)
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        if is_dense(tensor):
            storage = tensor.untyped_storage()
            self._storage, self._nbytes = weakref.ref(storage), storage.nbytes()
            self._geometry = tensor.storage_offset(), tensor.size(), tensor.stride()

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor still lies there."""
        if not self.fits(tensor):
            return False
        if self._storage is None:
            return True
        storage = tensor.untyped_storage()
        placed = tensor.storage_offset(), tensor.size(), tensor.stride()
        return storage is self._storage() and storage.nbytes() == self._nbytes and placed == self._geometry

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor lies somewhere in the same way."""
        return tensor.device == self._device and _form(tensor) == self._form

    def again(self, anew: Callable[[], Tensor]) -> Tensor:
        """A tensor that lies there; over storage of its own where the one of before is gone."""
        storage = None if self._storage is None else self._storage()
        if storage is None or (storage.nbytes() != self._nbytes and not storage.resizable()):
            return anew()
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._geometry)


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, of the same layout."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
        return plain.clone() if plain.is_mkldnn else plain.to("cpu", copy=True)


def same_values(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are the same, bit for bit, in type, shape, layout and values."""
    return _form(left) == _form(right) and all(map(_same_bits, parts_of(left), parts_of(right)))


def _form(tensor: Tensor) -> tuple[object, ...]:
    """All but the values: type, layout, shapes, how values are quantized."""
    shapes = tuple(part.shape for part in parts_of(tensor))
    joined = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
    return tensor.dtype, tensor.layout, tensor.is_nested, shapes, joined, *_quantized(tensor)


def _quantized(tensor: Tensor) -> tuple[object, ...]:
    if not tensor.is_quantized:
        return ()
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()
    scales, zeros = tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist()
    return tensor.qscheme(), tensor.q_per_channel_axis(), *scales, *zeros


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    for now, before in zip(parts_of(tensor), parts_of(values), strict=True):
        if not _same_bits(now, before):
            single = [slice(0, 1) if stride == 0 else slice(None) for stride in _strides(now)]
            now.data[tuple(single)].copy_(before[tuple(single)])  # Of an expanded tensor what there is of it.


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two dense tensors have the same bits; zeros of both signs differ, and NaN is the same as itself."""
    return left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))


def _bits(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach()
        if plain.is_mkldnn:
            plain = plain.to_dense()
        if plain.is_quantized:
            plain = plain.int_repr()
        plain = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return plain.view(_INTEGERS.get(plain.element_size(), torch.int64))
