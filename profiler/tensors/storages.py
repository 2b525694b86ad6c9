"""The bytes under tensors in this process: each storage has a number and counts once, however many tensors view it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import WeakIdKeyDictionary

from profiler.tensors.tensor_parts import local_part, parts_of


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage in this process under a strided tensor; of a distributed one that of its own part."""
    return local_part(tensor).untyped_storage()


def storage_key(tensor: Tensor) -> int:
    """The same for tensors over one storage, as long as it lives; a tensor without one (a sparse one) is its own."""
    return storage_of(tensor)._cdata if has_storage(tensor) else id(tensor)


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor lies in one storage: no sparse one does, and none of those that ``torch.func`` wraps."""
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


class ShownElements(NamedTuple):
    """The elements of its storage that a tensor shows."""

    storage: int
    element_bytes: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> ShownElements:
        """Of a tensor that lies in one storage."""
        own = local_part(tensor)
        sizes = tuple(size if stride else min(size, 1) for size, stride in zip(own.shape, own.stride(), strict=True))
        return cls(storage_key(own), own.element_size(), int(own.storage_offset()), sizes, own.stride())

    @property
    def end(self) -> int:
        """One more than the number of the last element."""
        return self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def meets(self, other: ShownElements) -> bool:
        """Whether both show an element of one storage; where their elements are of other sizes, whether they may."""
        if self.storage != other.storage or 0 in (*self.sizes, *other.sizes):
            return False
        if self.element_bytes != other.element_bytes:
            return True
        shown = torch.zeros(max(self.end, other.end), dtype=torch.bool)
        shown.as_strided(self.sizes, self.strides, self.offset).fill_(True)
        return bool(shown.as_strided(other.sizes, other.strides, other.offset).any())


class StorageTable:
    """Numbers every storage it meets; a number is never given twice, also when memory is used again."""

    def __init__(self) -> None:
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.bytes_of: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int | None:
        """The number of the tensor's storage; None where it has none (sparse tensors, those that torch.func wraps)."""
        if not has_storage(tensor):
            return None
        storage = storage_of(tensor)
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self.bytes_of)
            self.bytes_of[number] = storage.nbytes()
        return number

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of all the storages under ``tensors``."""
        return {number for tensor in tensors if (number := self.number(tensor)) is not None}

    def total_bytes(self, numbers: Iterable[int]) -> int:
        """Bytes of distinct storages."""
        return sum(self.bytes_of[number] for number in set(numbers))


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes under ``tensors``, every storage counted once; of sparse and nested ones those of all their parts."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        tensor = local_part(tensor)
        for part in [tensor] if tensor.layout is torch.strided else parts_of(tensor):
            if part.layout is torch.strided:
                seen[storage_key(part)] = storage_of(part).nbytes()
            else:
                seen[storage_key(tensor)] = part.nbytes
    return sum(seen.values())
