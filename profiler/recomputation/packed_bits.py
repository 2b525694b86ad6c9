"""Tensors that hold only zeros and ones, as a bit each: masks of dropout and of comparisons, until they are needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from profiler.recomputation.saved_tensors import PLAIN_TENSORS
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

# Values that are packed at once: on the CPU what goes on between stays in the cache, a device is kept busy.
_CPU_VALUES, _DEVICE_VALUES = 2**18, 2**24
_PER_BYTE = 8
# Times this, eight bytes of 0 or 1 in a word have their bits beside each other in its highest byte, the first lowest.
_GATHERING = 0x0102040810204080
# Times this, a byte stands in all eight bytes of a word; of these the first is to have its lowest bit, and so on.
_EVERYWHERE = 0x0101010101010101
_ITS_OWN = 0x8040201008040201 - 2**64


class PackedBits:
    """The values of a tensor of zeros and ones.

    Args:
        tensor: as for ``is_packable``; its values must be 0 or 1, as those of booleans and of ``bernoulli_`` are.
    """

    __slots__ = ("_bits", "_count", "_dtype", "_rest", "_size", "_stride")

    def __init__(self, tensor: Tensor) -> None:
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        values = _in_memory_order(tensor)
        self._count = values.numel() // _PER_BYTE * _PER_BYTE
        self._bits = torch.empty(self._count // _PER_BYTE, dtype=torch.uint8, device=tensor.device)
        self._rest = values[self._count :].clone()
        for start, end in _pieces(self._count, tensor.device):
            piece = values[start:end]
            words = piece.to(torch.bool).view(torch.int64)
            self._bits[start // _PER_BYTE : end // _PER_BYTE] = words.mul(_GATHERING).bitwise_right_shift_(56)

    @property
    def held_bytes(self) -> int:
        """Bytes that it takes: a bit for each value, and the last few as they were."""
        return self._bits.nbytes + self._rest.nbytes

    def unpacked(self) -> Tensor:
        """A tensor of the same values, that lies as the one before did."""
        tensor = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device=self._bits.device)
        return self.unpack_into(tensor)

    def unpack_into(self, tensor: Tensor) -> Tensor:
        """Give a tensor that lies as the one before did the same values, and return it."""
        values = _in_memory_order(tensor)
        for start, end in _pieces(self._count, tensor.device):
            words = self._bits[start // _PER_BYTE : end // _PER_BYTE].to(torch.int64)
            own_bits = words.mul_(_EVERYWHERE).bitwise_and_(_ITS_OWN).view(torch.uint8)
            values[start:end] = own_bits.ne_(0).view(torch.bool)
        values[self._count :] = self._rest
        return tensor


def is_packable(tensor: Any) -> bool:
    """Whether a tensor is a plain one that is all of its storage."""
    return (
        type(tensor) in PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and _is_dense(tensor)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether each value has a place of its own, without gaps."""
    expected = 1
    for stride, size in sorted(pair for pair in zip(tensor.stride(), tensor.size(), strict=True) if pair[1] > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _pieces(count: int, device: torch.device) -> list[tuple[int, int]]:
    most = _CPU_VALUES if device.type == "cpu" else _DEVICE_VALUES
    return [(start, min(start + most, count)) for start in range(0, count, most)]
