"""Saved-tensor hooks around a call that has some of its own: they hold the call's saved tensors all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from profiler.recomputation.saved_tensors import SavedParameter, TensorStandIn, geometry_of
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_parts import storage_key

leave_uncompiled(__name__)

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def hooks_now() -> Hooks | None:
    """The innermost saved-tensor hooks that are on; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]  # without a stub


def hooks_of_the_user() -> Hooks | None:
    """Returns them but for those of ``torch.utils.checkpoint``, which count tensors and hold none."""
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
