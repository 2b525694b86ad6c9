"""Stand-ins in the autograd graph for tensors until they are needed, and whether a recomputation saves the same.

Signatures describe the saved tensors of a first run without keeping them; those of a recomputation are compared.
Saved-tensor hooks around a call that has some of its own hold its saved tensors all the same.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from profiler.current_device import active_device
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_parts import storage_key
from profiler.workload.torch_state import current_flags

leave_uncompiled(__name__)

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_VIEWS = torch._C.DispatchKey.ADInplaceOrView
PLAIN_TENSORS = (Tensor, nn.Parameter)  # the types whose memory is all that they are
PLAIN_OR_FAKE = (*PLAIN_TENSORS, FakeTensor)  # a simulated device's have a layout, and no values


class RerunError(RuntimeError):
    """A recomputation cannot repeat the first run, or did not."""


class TensorStandIn(Protocol):
    """Stands for a tensor."""

    def tensor(self) -> Tensor:
        """The tensor; it may have to be made or fetched for that."""
        ...


def unpack(packed: Tensor | TensorStandIn) -> Tensor:
    """Returns the tensor for what saved-tensor hooks have packed."""
    return packed if isinstance(packed, Tensor) else packed.tensor()


class SavedTensor:
    """Stands in the graph for a tensor that is kept, with the version that autograd would have checked."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = version_of(tensor)

    def tensor(self) -> Tensor:
        """The tensor; raises RuntimeError where it was changed in place, as autograd does."""
        if version_of(self._tensor) != self._version:
            raise self._changed()
        return self._tensor

    def _changed(self) -> RuntimeError:
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(self._tensor.shape)} is at version {self._tensor._version}, "
            f"expected version {self._version}"
        )


class SavedParameter(SavedTensor):
    """Stands in the graph for a parameter.

    A graph of gradients (``create_graph``) holds it with the memory that it has then. Without hooks torch would look
    at it again later, and find what its ``.data`` is by then.
    """

    __slots__ = ("_holder", "_storage")

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(parameter)
        self._holder: TensorStandIn | None = None
        self._storage: int | None = None

    def pass_on(self, holder_of: Callable[[Tensor], TensorStandIn]) -> None:
        """Let another stand-in hold the parameter, unless it was changed in place: then using it has to fail."""
        if self._holder is None and version_of(self._tensor) == self._version:
            self._holder = holder_of(self._tensor)
            del self._tensor

    def tensor(self) -> Tensor:
        """The parameter; raises RerunError where its ``.data`` was replaced since a graph of gradients took it."""
        parameter = super().tensor() if self._holder is None else self._holder.tensor()
        if self._storage is None:
            if torch.is_grad_enabled():
                self._storage = storage_key(parameter)
        elif self._storage != storage_key(parameter):
            raise RerunError(
                "the .data of a parameter was replaced after gradients were taken with create_graph=True; replace it "
                "after the last backward of the step"
            )
        return parameter


# How many values of a tensor are compared, spread evenly; on the CPU only, where reading them waits for nothing.
_COMPARED_VALUES = 16
# Memory as numbers of so many bytes, of any length; of complex128 the first half of each value.
_NUMBERS: dict[int, Any] = {
    size: of * (2**62 // size)
    for size, of in ((1, ctypes.c_uint8), (2, ctypes.c_uint16), (4, ctypes.c_uint32), (8, ctypes.c_uint64))
}
_NUMBERS[16] = _NUMBERS[8]
Values = tuple[int, ...]  # the bits of each


def some_values_of(tensor: Tensor) -> Values:
    """Returns the values at ``compared_places`` of a plain tensor on the CPU; none of others."""
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided or not tensor.is_cpu:
        return ()
    address = tensor.data_ptr()  # Read as it lies: numpy may not see it, or its storage can never be resized again.
    if address == 0:
        return ()
    size = tensor.element_size()
    return _reader(tensor.shape, tensor.stride(), size)(_NUMBERS[size].from_address(address))


@functools.lru_cache(maxsize=10_000)
def _reader(shape: tuple[int, ...], stride: tuple[int, ...], element_bytes: int) -> Callable[[Any], Values]:
    """Returns a function that reads the compared values of a tensor that lies so."""
    numbers = 2 if element_bytes == 16 else 1
    offsets = []
    for place in compared_places(math.prod(shape)):
        offset = 0
        for length, step in zip(reversed(shape), reversed(stride), strict=True):
            place, index = divmod(place, length)
            offset += index * step
        offsets.append(numbers * offset)
    if len(offsets) < 2:  # An itemgetter of one returns no tuple.
        return lambda memory: tuple(memory[offset] for offset in offsets)
    return operator.itemgetter(*offsets)


def compared_places(size: int) -> range:
    """Returns the numbers of the compared ones of ``size`` elements, in the order of their indices."""
    return range(0, size, size // _COMPARED_VALUES | 1)  # Odd, so that it does not walk down one column.


def is_parameter_like(tensor: Tensor) -> bool:
    """Whether a saved tensor is a parameter, frozen ones too: backward takes it as it is then, whatever its data."""
    return tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, nn.Parameter))


def version_of(tensor: Tensor) -> int:
    """Returns the number of changes in place of a tensor."""
    return -1 if tensor.is_inference() else tensor._version  # Inference tensors count no changes.


def without_graph(tensor: Tensor) -> Tensor:
    """The tensor without its graph, sharing its version counter; for use inside a dispatch mode.

    There torch leaves out the layer that makes a detached tensor share the counter.
    """
    without = torch._C._dispatch_tls_is_dispatch_key_excluded(_VIEWS)
    try:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS, False)
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS, without)


def change_counter(tensor: Tensor) -> Tensor:
    """Returns a tensor that counts changes in place with a plain one and all views of it, and lies in no memory."""
    with torch._C._DisableTorchDispatch():
        counter = without_graph(tensor)
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


# Size, stride, offset, dtype, and whether it is read as its conjugate, or as its negative.
Geometry = tuple[Any, Any, Any, torch.dtype, bool, bool]


def geometry_of(tensor: Tensor) -> Geometry:
    """Returns the geometry of a strided tensor in its storage."""
    size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
    return size, stride, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def tensor_over(storage: torch.UntypedStorage, geometry: Geometry) -> Tensor:
    """The tensor that lies so in a storage."""
    size, stride, offset, dtype, conjugate, negative = geometry
    simulated = active_device() is not None
    with torch._C._DisableTorchDispatch() if simulated else nullcontext():
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if simulated and storage.device.type == "meta":  # A fake tensor's; a simulated device has real ones as well.
        tensor = FakeTensor(detect_fake_mode(), tensor, torch.device("cpu"))
    return _read_as(tensor, conjugate, negative)


def _read_as(tensor: Tensor, conjugate: bool, negative: bool) -> Tensor:
    if tensor.is_conj() != conjugate:
        tensor = torch._conj(tensor)
    return tensor if tensor.is_neg() == negative else torch._neg_view(tensor)


class SavedSignature(NamedTuple):
    """How one saved tensor lies in memory, and on the CPU the bits of some of its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout
    values: Values


def signature_of(tensor: Tensor, *, values: bool = True) -> SavedSignature:
    """The signature of a tensor as it is now.

    Args:
        tensor: a tensor that autograd saves.
        values: whether its values count.
    """
    layout = tensor.layout
    if layout is not torch.strided or type(tensor) not in PLAIN_OR_FAKE:
        shape = torch.Size(()) if tensor.is_nested else tensor.shape  # Ragged lengths are no plain numbers.
        return SavedSignature(shape, (), tensor.dtype, layout, ())
    return SavedSignature(tensor.shape, tensor.stride(), tensor.dtype, layout, some_values_of(tensor) if values else ())


class SignatureCheck:
    """Compares the tensors that a recomputation saves with the signatures of the first run.

    Args:
        expected: the signatures of the first run, in order; None for trained leaves, which are there anyway.
        undefined: the numbers of the tensors of which some values are undefined memory.

    Attributes:
        difference: the first difference, in words; empty for none.
        other_values: the values of the recomputation where nothing else differs, by the tensor's number.
    """

    def __init__(self, expected: Sequence[SavedSignature | None], undefined: Collection[int] = ()) -> None:
        self.difference = ""
        self.other_values: dict[int, Values] = {}
        self._expected, self._undefined = expected, undefined
        self._count = 0

    def saw(self, tensor: Tensor) -> None:
        """Compares the tensor that the recomputation saves next."""
        number, self._count = self._count, self._count + 1
        if self.difference or number >= len(self._expected):
            return
        expected = self._expected[number]
        if expected is None:
            return
        values = bool(expected.values) and number not in self._undefined
        got = signature_of(tensor, values=values)
        if got == expected:
            return
        if got[:4] != expected[:4]:
            self.difference = f"{_words(got)} as its {number + 1}. tensor, not {_words(expected)}"
        elif values and got.values:
            self.other_values[number] = got.values


def _words(signature: SavedSignature) -> str:
    strides = f" with strides {signature.stride}" if signature.stride else ""
    return f"{str(signature.dtype).removeprefix('torch.')} of shape {tuple(signature.shape)}{strides}"


@contextmanager
def undefined_memory_shown() -> Iterator[None]:
    """Has memory that kernels take inside and do not fill hold values that ``is_undefined`` recognises."""
    put_back = current_flags()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch._C._set_deterministic_algorithms(True, warn_only=True)
            torch._C._set_deterministic_fill_uninitialized_memory(True)
            yield
        finally:
            put_back()


def is_undefined(tensor: Tensor, first: Values, second: Values) -> bool:
    """Whether all values in which two runs differ are undefined memory, as a third run shows it.

    Args:
        tensor: saved by the third run, inside ``undefined_memory_shown``.
        first, second: values of the two runs.
    """
    compared = tensor.detach().reshape(-1)[list(compared_places(tensor.numel()))]
    if compared.is_floating_point() or compared.is_complex():
        shown = compared.isnan()
    else:
        shown = compared == (True if compared.dtype is torch.bool else torch.iinfo(compared.dtype).max)
    return all(is_shown or one == other for one, other, is_shown in zip(first, second, shown.tolist(), strict=True))


def hooks_now() -> Hooks | None:
    """The innermost saved-tensor hooks that are on; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]  # without a stub


def hooks_of_the_user() -> Hooks | None:
    """The innermost hooks, but for those of ``torch.utils.checkpoint``, which count tensors and hold none."""
    hooks = hooks_now()
    return None if hooks is None or _of_checkpoint(hooks) else hooks


def in_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` takes what is saved now.

    It gives backward the tensors saved by its recomputation in the place of those of the first run, by their order:
    both have to save the same.
    """
    hooks = hooks_now()
    return hooks is not None and _of_checkpoint(hooks)


def _of_checkpoint(hooks: Hooks) -> bool:
    return getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def packing_by(hooks: Hooks) -> Callable[[Tensor], TensorStandIn]:
    """Has hooks pack tensors, each once."""
    packed: dict[Any, _PackedTensor] = {}

    def holder_of(tensor: Tensor) -> _PackedTensor:
        key = (storage_key(tensor), geometry_of(tensor) if tensor.layout is torch.strided else None)
        if key not in packed:
            packed[key] = _PackedTensor(hooks, tensor)
        return packed[key]

    return holder_of


class _PackedTensor:
    """Stands for a tensor that hooks outside of a call hold; they unpack it once, because some can do so only once."""

    __slots__ = ("_packed", "_tensor", "_unpack")

    def __init__(self, hooks: Hooks, tensor: Tensor) -> None:
        pack, self._unpack = hooks
        with torch.no_grad():  # As autograd has it.
            self._packed: Any = pack(tensor.detach() if tensor.requires_grad else tensor)
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._unpack(self._packed)
            self._packed = None
        return self._tensor


class SavedParameters:
    """Makes stand-ins of the parameters that a call saves; hooks of the user's around it hold them once it has run.

    Made before the call's own hooks are on.
    """

    __slots__ = ("_hooks", "_made")

    def __init__(self) -> None:
        self._hooks = hooks_of_the_user()
        self._made: list[SavedParameter] = []

    def stand_in(self, parameter: Tensor) -> SavedParameter:
        """Returns the stand-in of a parameter."""
        made = SavedParameter(parameter)
        if self._hooks is not None:
            self._made.append(made)
        return made

    def pass_on(self) -> None:
        """The call has run."""
        if self._hooks is not None:
            holder_of = packing_by(self._hooks)
            for made in self._made:
                made.pass_on(holder_of)
            self._made.clear()
