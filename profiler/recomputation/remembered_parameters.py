"""Parameters as they are before a first run; a second one is refused where their values have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from profiler.recomputation.saved_tensors import RerunError, tensor_over, version_of
from profiler.tensors.tensor_parts import storage_key


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
        """What its ``.data`` was; raises RerunError where it had another size or type."""
        size, dtype = self.parameter.size(), self.parameter.dtype
        span = self.offset + 1 + sum((n - 1) * stride for n, stride in zip(size, self.stride, strict=True))
        assert self.storage is not None
        if span * dtype.itemsize > self.storage.nbytes():
            raise RerunError("expected parameters as in forward, got one of another shape or type")
        return tensor_over(self.storage, (size, self.stride, self.offset, dtype, False, False))


class RememberedParameters:
    """Records parameters as they are now. Plain ones are read and compared in bulk, which is much faster.

    Args:
        parameters: of the modules of a stage.
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
        """Those that have changed since, or may have."""
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
        """Those whose values were set in place since, with the versions before."""
        plain = [(p, version) for p, version in zip(self._plain, self._versions, strict=True) if p._version != version]
        return plain + [
            (one.parameter, one.version) for one in self._others if version_of(one.parameter) != one.version
        ]

    def accept(self, parameter: Tensor) -> None:
        """What its values were set to since is what they are remembered as."""
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
