"""What autograd saved in a first run, told without keeping it; a second run is compared with it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from profiler.recomputation.saved_tensors import PLAIN_TENSORS, Values, compared_places, some_values_of
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.torch_flags import current_flags

leave_uncompiled(__name__)


class SavedSignature(NamedTuple):
    """Of one saved tensor: how it lies in memory, and on the CPU the bits of some of its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout
    values: Values


def signature_of(tensor: Tensor, *, values: bool = True) -> SavedSignature:
    """The signature of a tensor as it is now.

    Args:
        tensor: that autograd saves.
        values: whether its values count.
    """
    layout = tensor.layout
    if layout is not torch.strided or type(tensor) not in PLAIN_TENSORS:
        shape = torch.Size(()) if tensor.is_nested else tensor.shape  # Ragged lengths are no plain numbers.
        return SavedSignature(shape, (), tensor.dtype, layout, ())
    return SavedSignature(tensor.shape, tensor.stride(), tensor.dtype, layout, some_values_of(tensor) if values else ())


class SignatureCheck:
    """Holds what a second run saves, tensor by tensor, against the signatures of the first.

    Args:
        expected: of the first run, in order; None for trained leaves, which are there anyway.
        undefined: numbers of those of which some values are undefined memory.

    Attributes:
        difference: the first thing that is another, in words; empty where nothing is.
        other_values: values of the second run where nothing else is another, by the tensor's number.
    """

    def __init__(self, expected: Sequence[SavedSignature | None], undefined: Collection[int] = ()) -> None:
        self.difference = ""
        self.other_values: dict[int, Values] = {}
        self._expected, self._undefined = expected, undefined
        self._count = 0

    def saw(self, tensor: Tensor) -> None:
        """The second run saves this one next."""
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
    """Inside, memory that a kernel takes and does not fill holds what ``is_undefined`` tells."""
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
