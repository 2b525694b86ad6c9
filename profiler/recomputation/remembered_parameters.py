"""Parameters as they are before a first run; a second one is refused where their values have changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from profiler.recomputation.saved_tensors import RerunError, tensor_over, version_of
from profiler.tensors.storages import storage_key


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


def remembered_parameter(parameter: Tensor) -> RememberedParameter:
    """A parameter as it is now."""
    if type(parameter) is nn.Parameter and parameter.layout is torch.strided and not parameter.is_inference():
        lies: Any = parameter.storage_offset(), parameter.stride()
        return RememberedParameter(
            parameter, parameter._version, parameter.requires_grad, parameter.untyped_storage(), *lies
        )
    return RememberedParameter(parameter, version_of(parameter), parameter.requires_grad, None, 0, ())
