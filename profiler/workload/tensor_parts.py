"""Finds the parts of a tensor in this process, and their bytes: the local part, dense tensors, storages.

A distributed tensor holds a part here, and a result of a collective may still be under way. Tensors of other layouts
(sparse, nested, wrapped ones) consist of dense tensors, which are read and written. Each storage has a number and
counts once, however many tensors view it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from profiler.workload.tensor_trees import tensors_in

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
    """Returns the tree once the collectives that its tensors come from are over: dropped early, they never end."""
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
    """Returns the context of a subclass that wraps tensors: all but these."""
    return tensor.__tensor_flatten__()[1]


def has_values(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta


def is_dense(tensor: Tensor) -> bool:
    """Whether its values simply lie in its storage, one after another."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def sizes_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape in plain numbers; of a nested tensor how many it holds, and the numbers in all of them."""
    return (tensor.size(0), tensor.numel()) if tensor.is_nested else tuple(tensor.shape)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage in this process under a strided tensor; of a distributed one that of its own part."""
    return local_part(tensor).untyped_storage()


def storage_key(tensor: Tensor) -> int:
    """Returns one number for all tensors over a storage, as long as it lives; a tensor without one has its own."""
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
        """Makes the record of a tensor that lies in one storage."""
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


# Elements of a block in which copies of transposed matrices are made (``aten/src/ATen/native/Copy.cpp``).
_TURNED_AT_ONCE = 60 * 60


def copied_gradient_bytes(pairs: Iterable[tuple[Tensor, Tensor]]) -> int:
    """The most bytes by which more is alive while autograd makes gradients of parameters their ``.grad``.

    A first gradient that has its parameter's strides is taken as it is, others are copied one by one
    (``torch/csrc/autograd/functions/accumulate_grad.h``); a later one is added to what is there.

    Args:
        pairs: each parameter with what backward has made for it.
    """
    copied: dict[int, int] = {}
    memory_bytes: dict[int, int] = {}
    buffer_bytes = 0
    for parameter, gradient in pairs:
        if not parameter.is_leaf or parameter.grad is not None or gradient.shape != parameter.shape:
            continue
        strides = zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
        if any(made != wanted for size, made, wanted in strides if size != 1):
            key, copy_bytes = storage_key(gradient), parameter.numel() * parameter.element_size()
            copied[key] = copied.get(key, 0) + copy_bytes
            memory_bytes[key] = storage_of(gradient).nbytes()
            if gradient.dim() == 2 and gradient.device.type == "cpu" and parameter.numel() >= _TURNED_AT_ONCE:
                buffer_bytes = max(buffer_bytes, _TURNED_AT_ONCE * parameter.element_size())
    # Memory under several gradients goes when the last of them is copied.
    more_bytes = sum(max(0, copied[key] - memory_bytes[key]) for key in copied)
    return more_bytes + buffer_bytes + max((min(copied[key], memory_bytes[key]) for key in copied), default=0)
