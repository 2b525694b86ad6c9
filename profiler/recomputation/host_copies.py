"""Copies of a tensor's values in memory that the device's allocator does not count."""

from __future__ import annotations

import torch
from torch import Tensor

from profiler.recomputation.saved_tensors import PLAIN_TENSORS

# numpy knows no such types; they are copied as integers of the same size.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# A view that skips most of its storage is not worth copying: what lies between comes along.
_MOST_SPREAD = 2


def host_copy(tensor: Tensor) -> Tensor | None:
    """The values with the same shape and strides, in host memory; None for tensors that are no plain strided ones.

    On the CPU it lies in numpy's memory. From a GPU it is copied into page-locked memory in the order of the current
    stream, without waiting for it.
    """
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    if tensor.numel() == 0 or span > _MOST_SPREAD * tensor.numel():
        return None if tensor.numel() else tensor.detach()
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        plain = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
        if plain.device.type == "cpu":
            copied = _in_numpy_memory(plain)
        else:
            copied = torch.empty((span,), dtype=plain.dtype, pin_memory=True).copy_(plain, non_blocking=True)
        return copied.as_strided(tensor.size(), tensor.stride())


def _in_numpy_memory(flat: Tensor) -> Tensor:
    try:
        return torch.from_numpy(flat.numpy().copy())
    except TypeError:
        return torch.from_numpy(flat.view(_AS_INTEGERS[flat.element_size()]).numpy().copy()).view(flat.dtype)


def put_back(tensor: Tensor, copied: Tensor) -> None:
    """Write the values of a copy into a tensor of the same shape; its version stays as it was."""
    with torch._C._DisableTorchDispatch():
        tensor.data.copy_(copied, non_blocking=True)
