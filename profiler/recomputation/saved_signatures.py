"""What autograd saved in a first run, told without keeping it; a second run is held against that."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from profiler.recomputation.saved_tensors import PLAIN_TENSORS, compared_step, some_values_of
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class SavedSignature(NamedTuple):
    """Of one saved tensor: how it lies in memory, and on the CPU some of its values as bytes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout
    values: bytes


def signature_of(tensor: Tensor, *, values: bool = True) -> SavedSignature:
    """The signature of a tensor as it is now.

    Args:
        tensor: that autograd saves.
        values: whether its values count.
    """
    layout = tensor.layout
    if layout is not torch.strided or type(tensor) not in PLAIN_TENSORS:
        shape = torch.Size(()) if tensor.is_nested else tensor.shape  # Ragged lengths are no plain numbers.
        return SavedSignature(shape, (), tensor.dtype, layout, b"")
    return SavedSignature(
        tensor.shape, tensor.stride(), tensor.dtype, layout, some_values_of(tensor) if values else b""
    )


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
        self.other_values: dict[int, bytes] = {}
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
    on, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        try:
            yield
        finally:
            torch._C._set_deterministic_fill_uninitialized_memory(fills)
            torch.use_deterministic_algorithms(on, warn_only=warn_only)


def is_undefined(tensor: Tensor, first: bytes, second: bytes) -> bool:
    """Whether all values in which two runs differ are undefined memory, as a third run shows it.

    Args:
        tensor: saved by the third run, inside ``undefined_memory_shown``.
        first, second: values of the two runs.
    """
    sampled = tensor.detach().reshape(-1)[:: compared_step(tensor.numel())]
    if sampled.is_floating_point() or sampled.is_complex():
        shown = sampled.isnan()
    else:
        shown = sampled == (True if sampled.dtype is torch.bool else torch.iinfo(sampled.dtype).max)
    size = tensor.element_size()
    differs = (np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8)).reshape(-1, size).any(axis=1)
    return bool(shown.numpy()[differs].all())
