"""Checking: whether what runs again in backward gives the bytes that the forward gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from profiler.recomputation.op_tape import Lazy
from profiler.recomputation.selection import Selection
from profiler.recomputation.selective_call import Kept, SelectiveCall

# GPU kernels may add in another order; what something out of sight has written differs by far more than this.
_TOLERANCE = 0.05


class CheckedCall(SelectiveCall):
    """A selective call that keeps everything beside, and holds what is made again against it.

    What a kernel writes without torch's dispatcher (numpy on a tensor's memory, an extension, a Triton kernel) is no
    op of the stage: the ops around it can run again, and miss it.

    Attributes:
        wrong: ordinals of the ops that made a storage which was not the same again.
    """

    def __init__(self, module: nn.Module, selection: Selection) -> None:
        super().__init__(module, selection)
        self.wrong: set[int] = set()
        self._ordinals = selection.ordinals

    def _pack(self, tensor: Tensor) -> Any:
        packed = super()._pack(tensor)
        if not isinstance(packed, Lazy):
            return packed
        with self._watch.unseen(tensor):
            return _Checked(packed, Kept(tensor.detach()), self)

    def compare(self, lazy: Lazy, kept: Tensor) -> None:
        """Note who made the saved tensor if it is not the same again."""
        if not _same(lazy.tensor(), kept):
            self.wrong |= {self._ordinals[position] for position in lazy.writers}


class _Checked:
    """In the graph: a saved tensor both kept and made again; backward gets the kept one."""

    __slots__ = ("_call", "_kept", "_lazy")

    def __init__(self, lazy: Lazy, kept: Kept, call: CheckedCall) -> None:
        self._lazy, self._kept, self._call = lazy, kept, call

    def tensor(self) -> Tensor:
        kept = self._kept.tensor()
        self._call.compare(self._lazy, kept)
        return kept


def _same(again: Tensor, kept: Tensor) -> bool:
    if again.shape != kept.shape or again.dtype != kept.dtype:
        return False
    if torch.equal(again, kept):
        return True
    if not (kept.is_floating_point() or kept.is_complex()):
        return False
    tolerance = 0.0 if kept.device.type == "cpu" else _TOLERANCE
    return torch.allclose(again, kept, rtol=tolerance, atol=tolerance, equal_nan=True)
