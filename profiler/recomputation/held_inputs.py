"""The arguments of a call, held until its recomputation: as they are, in host memory, or by the call before."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from profiler.recomputation.module_rerun import detached, with_other_history
from profiler.recomputation.remembered_tensors import UncountedCopy, uncounted_copy
from profiler.recomputation.saved_tensors import Geometry, Values, geometry_of, some_values_of, version_of
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_parts import storage_key
from profiler.workload.tensor_trees import tensors_in, with_tensors, without_tensors

leave_uncompiled(__name__)


class BatchCopies:
    """Copies of the inputs of a model that backward does not check: the loop may write to those before.

    Args:
        batch: the model's arguments; None where they are not known: then it may be any tensor that needs no gradient.

    Attributes:
        backward_begun: whether the backward of a dropped call, or of one that runs as a program, has begun.
    """

    def __init__(self, batch: Any) -> None:
        self.backward_begun = False
        self._storages = None if batch is None else {storage_key(tensor) for tensor in tensors_in(batch)}
        self._copies: dict[tuple[int, int, Geometry], UncountedCopy | None] = {}

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a part of the batch."""
        if tensor.grad_fn is not None:
            return False
        return not tensor.requires_grad if self._storages is None else storage_key(tensor) in self._storages

    def copy_of(self, tensor: Tensor) -> UncountedCopy | None:
        """Its values in host memory, once a step; None for tensors that cannot be copied as they lie."""
        if tensor.layout is not torch.strided:
            return None
        key = storage_key(tensor), version_of(tensor), geometry_of(tensor)
        if key not in self._copies:
            self._copies[key] = uncounted_copy(tensor)
        return self._copies[key]


class Offloadable(Protocol):
    """Stands for a held tensor that may be in host memory in the meantime."""

    def fetched(self) -> tuple[Tensor, int]:
        """The tensor on the device, and the version that it has unless it was changed in place."""
        ...


class HeldTensor:
    """A tensor that a recomputation reads, with what tells whether it was changed since.

    Attributes:
        tensor: the tensor, or its stand-in.
        version: the version when it was first read.
        values: some of its values then, for a part of the batch.
        copy: all of its values, for a part of the batch that backward itself does not read.
    """

    __slots__ = ("copy", "tensor", "values", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | Offloadable = tensor
        self.version = version_of(tensor)
        self.values: Values | None = None
        self.copy: UncountedCopy | None = None

    def fetched(self) -> Tensor:
        """The tensor, on the device from now on."""
        if not isinstance(self.tensor, Tensor):
            self.tensor, self.version = self.tensor.fetched()
        return self.tensor

    def as_before(self) -> Tensor | None:
        """The tensor with the values that it had; None where it was changed since and there is no copy."""
        tensor = self.fetched()
        if version_of(tensor) == self.version and not self._has_other_values(tensor):
            return tensor
        return None if self.copy is None else self.copy.on(tensor.device)

    def _has_other_values(self, tensor: Tensor) -> bool:
        """Whether it was written to past autograd (``tensor.data``), as far as is looked at."""
        if self.copy is not None and self.copy.other_than(tensor):
            return True
        return self.values is not None and some_values_of(tensor) != self.values


class _HostTensor(HeldTensor):
    """A tensor of which only a copy in host memory is held."""

    __slots__ = ("_device", "_has_history", "_requires_grad")

    def __init__(self, tensor: Tensor, copy: UncountedCopy) -> None:
        super().__init__(torch.empty(0))
        self.copy = copy
        self._device = tensor.device
        self._has_history, self._requires_grad = tensor.grad_fn is not None, tensor.requires_grad

    def fetched(self) -> Tensor:
        """Another tensor on the device, each time."""
        assert self.copy is not None
        with torch._C._DisableTorchDispatch():
            made = self.copy.on(self._device)
            return with_other_history(made) if self._has_history else made.requires_grad_(self._requires_grad)


class HeldInput:
    """The arguments of a call.

    Args:
        arguments: positional and keyword arguments of the call.
        tensors: all that are in the arguments, in order.
        links: number of an input tensor -> number of the output of the call before that it is.
        hold_linked: whether linked tensors are held as well; else the call before makes them again.
        on_device: numbers of the tensors that are held on the device, all if None; the others lie in host memory.
    """

    __slots__ = ("_arguments", "_held", "links")

    def __init__(
        self,
        arguments: Any,
        tensors: Sequence[Tensor],
        links: Mapping[int, int],
        *,
        hold_linked: bool = False,
        on_device: Collection[int] | None = None,
    ) -> None:
        self.links = links
        self._arguments = without_tensors(arguments)
        kept: list[Tensor | None] = [None if i in links and not hold_linked else t for i, t in enumerate(tensors)]
        copies: dict[int, HeldTensor] = {}
        if on_device is not None:
            for i, tensor in enumerate(kept):
                copied = None if tensor is None or i in on_device else uncounted_copy(tensor, math.inf)
                if tensor is not None and copied is not None:
                    copies[i], kept[i] = _HostTensor(tensor, copied), None
        self._held = [copies.get(i) if t is None else HeldTensor(t) for i, t in enumerate(detached(kept))]

    @property
    def is_whole(self) -> bool:
        """Whether all of its tensors are held."""
        return None not in self._held

    def holds_of(self, batch: BatchCopies) -> bool:
        """Whether anything that it holds is a part of the batch."""
        return any(held is not None and batch.holds(held.fetched()) for held in self._held)

    def copy_batch(self, batch: BatchCopies, saved: Collection[int]) -> None:
        """Copy what is of the batch, unless autograd has saved it: then backward reads what is there by then.

        Args:
            batch: the step's batch.
            saved: storages that the call saved for backward.
        """
        for held in self._held:
            if held is not None and batch.holds(tensor := held.fetched()):
                held.values = some_values_of(tensor)
                held.copy = batch.copy_of(tensor) if storage_key(tensor) not in saved else None

    def tensors(self, linked: Sequence[Tensor]) -> list[Tensor]:
        """The tensors as they are now; ``linked`` are what the call before returned."""
        return [linked[self.links[i]] if held is None else held.fetched() for i, held in enumerate(self._held)]

    def tensors_as_before(self, linked: Sequence[Tensor]) -> list[Tensor] | None:
        """The tensors as they were; None where one was changed in place since, and there is no copy of it."""
        found = [linked[self.links[i]] if held is None else held.as_before() for i, held in enumerate(self._held)]
        there = [tensor for tensor in found if tensor is not None]
        return there if len(there) == len(found) else None

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """The positional and keyword arguments with these tensors in their places."""
        return with_tensors(self._arguments, tensors)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Hold all of these from now on."""
        self._held = [held or HeldTensor(tensor) for held, tensor in zip(self._held, tensors, strict=True)]

    def release_linked(self) -> None:
        """Hold no linked tensors any more."""
        self._held = [None if i in self.links else held for i, held in enumerate(self._held)]

    def release(self) -> None:
        """Hold nothing any more."""
        self._held = []

    def held(self, number: int) -> HeldTensor | None:
        """The tensor with this number; None where the call before makes it."""
        return self._held[number]


class CallOutput:
    """References to the output of a call, with its state then; the next call may take tensors of it.

    Args:
        tensors: the tensors in the output.
    """

    __slots__ = ("_references", "_states")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors]
        self._states = [_state_of(tensor) for tensor in tensors]

    def links_to(self, inputs: Sequence[Tensor], expected: set[int]) -> tuple[dict[int, int], bool]:
        """Returns the expected input tensors that are in it, by their numbers, and whether one was changed since."""
        numbers = {id(tensor): j for j, reference in enumerate(self._references) if (tensor := reference()) is not None}
        same = {i: numbers[id(tensor)] for i, tensor in enumerate(inputs) if i in expected and id(tensor) in numbers}
        links = {i: j for i, j in same.items() if _state_of(inputs[i]) == self._states[j]}
        return links, len(links) < len(same)


def _state_of(tensor: Tensor) -> tuple[int, int]:
    return version_of(tensor), storage_key(tensor)
