"""Checks of running again: that it gives what the forward gave, and that no tensor of it outlives it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.recomputed_tensors import RecomputedTensor
from profiler.recomputation.saved_tensors import SavedTensor, TensorStandIn
from profiler.recomputation.selection import Selection
from profiler.recomputation.selective_call import SelectiveCall
from profiler.tensors.local_tensors import any_distributed
from profiler.tensors.storages import storage_of
from profiler.tensors.tensor_trees import tensors_in

# GPU kernels may add in another order; what something out of sight has written differs by far more than this.
_TOLERANCE = 0.05


class CheckedCall(SelectiveCall):
    """A selective call that also keeps everything, and compares what is made again with it.

    What a kernel writes without torch's dispatcher (numpy on a tensor's memory, an extension, a Triton kernel) is no
    op of the stage: the ops before and after it can run again, and miss it.

    Attributes:
        wrong: ordinals of the ops that made a storage which was not the same again.
    """

    def __init__(self, module: nn.Module, selection: Selection) -> None:
        super().__init__(module, selection)
        self.wrong: set[int] = set()

    def _pack(self, tensor: Tensor) -> TensorStandIn:
        packed = super()._pack(tensor)
        if not isinstance(packed, RecomputedTensor):
            return packed
        with self._mode.not_recording(tensor):
            return _CheckedTensor(packed, SavedTensor(tensor.detach()), self)

    def compare(self, recomputed: RecomputedTensor, kept: Tensor) -> None:
        """Note the ops that made the saved tensor if it is not the same again, what they do not write left out."""
        again = recomputed.tensor()
        if not self._tape.may_be_unwritten(recomputed) and not _same(again, kept):
            self.wrong |= {self.selection.ordinals[position] for position in recomputed.writers}


class _CheckedTensor:
    """Stands in the graph for a saved tensor that is both kept and made again; backward gets the kept one."""

    __slots__ = ("_call", "_kept", "_recomputed")

    def __init__(self, recomputed: RecomputedTensor, kept: SavedTensor, call: CheckedCall) -> None:
        self._recomputed, self._kept, self._call = recomputed, kept, call

    def tensor(self) -> Tensor:
        kept = self._kept.tensor()
        self._call.compare(self._recomputed, kept)
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


class EscapedTensors(TorchDispatchMode):
    """Tells, once all results are let go, whether a storage that ops inside have made is still held by anything."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref[Any]] = []
        self._stored = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_distributed(types):
            return NotImplemented
        known = {id(storage_of(t)) for t in tensors_in((args, kwargs)) if t.layout is torch.strided}
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            if tensor.layout is torch.strided and id(storage := storage_of(tensor)) not in known:
                self._storages.append(weakref.ref(storage))
        return output

    def note_stored(self, tensors: Iterable[Tensor]) -> None:
        """These are stored now, by somebody who will have let go of them when ``any_left`` is asked."""
        made = {id(storage) for reference in self._storages if (storage := reference()) is not None}
        strided = (tensor for tensor in tensors if tensor.layout is torch.strided)
        self._stored = self._stored or any(id(storage_of(tensor)) in made for tensor in strided)

    def any_left(self) -> bool:
        """Whether a storage made inside is still alive, or was stored, cyclic garbage aside."""
        if self._stored:
            return True
        if not any(reference() is not None for reference in self._storages):
            return False
        gc.collect()
        return any(reference() is not None for reference in self._storages)
