"""Copies of a tensor's values in memory that the device's allocator does not count."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from profiler.recomputation.saved_tensors import PLAIN_TENSORS

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
    # Not by ``flat.numpy()``: a storage that numpy has seen can never be resized again.
    memory = np.empty(flat.numel() * flat.element_size(), np.uint8)
    return torch.from_numpy(memory).view(flat.dtype).copy_(flat)


def put_back(tensor: Tensor, copied: Tensor) -> None:
    """Write the values of a copy into a tensor, resized where it has another shape now; its version stays as it was."""
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        if (tensor.shape, tensor.dtype) == (copied.shape, copied.dtype):
            tensor.data.copy_(copied, non_blocking=True)
        else:
            tensor.data = copied.to(tensor.device, copy=True)
