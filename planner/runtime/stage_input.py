"""The arguments of a stage call, held until it runs again, in host memory meanwhile, or made by the stage before."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.runtime.transfers import OffloadableTensor, OffloadedStorage, input_storages
from profiler.recomputation.host_copies import UncountedCopy, uncounted_copy
from profiler.recomputation.module_rerun import detached
from profiler.recomputation.saved_tensors import (
    Geometry,
    RerunError,
    Values,
    geometry_of,
    some_values_of,
    version_of,
)
from profiler.tensors.tensor_parts import storage_key
from profiler.tensors.tensor_trees import tensors_in, with_tensors, without_tensors
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class BatchCopies:
    """Copies of what a model was given, of tensors that backward does not check: the loop may write to those before.

    Args:
        batch: the model's arguments; None where they are not known: then it may be any tensor that needs no gradient.

    Attributes:
        backward_begun: whether the backward of a stage has begun that runs again, or as a program.
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


class StageInput:
    """What a dropped stage needs to run again.

    Args:
        stage_name: for errors.
        arguments: of the call.
        tensors: all that are in the arguments, in order.
        links: number of an input tensor -> number of the output of the stage before that it is.
        hold_linked: whether linked tensors are held as well; else the stage before makes them again.
    """

    __slots__ = ("_arguments", "_copies", "_stage_name", "_tensors", "_values", "_versions", "links")

    def __init__(
        self, stage_name: str, arguments: Any, tensors: Sequence[Tensor], links: dict[int, int], hold_linked: bool
    ) -> None:
        self.links = links
        self._stage_name = stage_name
        self._arguments = without_tensors(arguments)
        held = [None if i in links and not hold_linked else tensor for i, tensor in enumerate(tensors)]
        self._tensors: list[Tensor | OffloadableTensor | None] = detached(held)
        self._versions = [version_of(tensor) for tensor in tensors]
        self._copies: dict[int, UncountedCopy] = {}
        self._values: dict[int, Values] = {}  # some, of what is of the batch

    def holds_of(self, batch: BatchCopies) -> bool:
        """Whether anything that it holds is a part of the batch."""
        return any(isinstance(tensor, Tensor) and batch.holds(tensor) for tensor in self._tensors)

    def copy_batch(self, batch: BatchCopies, saved: Collection[int]) -> None:
        """Copy what is of the batch, unless autograd has saved it: then backward reads what is there by then.

        Args:
            batch: of the step.
            saved: storages that the call saved for backward.
        """
        for i, tensor in enumerate(self._tensors):
            if isinstance(tensor, Tensor) and batch.holds(tensor):
                self._values[i] = some_values_of(tensor)
                copied = batch.copy_of(tensor) if storage_key(tensor) not in saved else None
                if copied is not None:
                    self._copies[i] = copied

    def held(self) -> list[Tensor | None]:
        """The tensors that are held, None for the others; what is in host memory is brought back."""
        # All views of a storage come back at once: which are in host memory is asked before.
        offloaded = [isinstance(tensor, OffloadableTensor) and tensor.offloaded for tensor in self._tensors]
        for i, tensor in enumerate(self._tensors):
            if isinstance(tensor, OffloadableTensor):
                self._tensors[i] = fetched = tensor.tensor() if offloaded[i] else tensor.value
                self._versions[i] = version_of(fetched) if offloaded[i] else self._versions[i]
        return [None if isinstance(tensor, OffloadableTensor) else tensor for tensor in self._tensors]

    def unchanged(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The held tensors as they were in the first run, None for the others: those changed since are their copies.

        Raises:
            RerunError: there is none.
        """
        now = list(tensors)
        for i, (tensor, version) in enumerate(zip(tensors, self._versions, strict=True)):
            if tensor is None:
                continue
            if version_of(tensor) != version or self._has_other_values(i, tensor):
                if i not in self._copies:
                    raise RerunError(
                        "expected its input to be as it was in forward, got one that was changed in place since; "
                        f"change a copy, or keep this stage: a rule with modules = {self._stage_name!r} and "
                        'action = "keep"'
                    )
                now[i] = self._copies[i].on(tensor.device)
        return now

    def _has_other_values(self, number: int, tensor: Tensor) -> bool:
        """Whether a tensor of the batch was written to past autograd (``tensor.data``), as far as is looked at."""
        if number in self._copies and self._copies[number].other_than(tensor):
            return True
        return number in self._values and some_values_of(tensor) != self._values[number]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """The positional and keyword arguments with these tensors in their places."""
        return with_tensors(self._arguments, tensors)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Hold these from now on."""
        self._tensors = list(tensors)
        self._versions = [version_of(tensor) for tensor in tensors]

    def release_linked(self) -> None:
        """Hold no linked tensors any more."""
        self._tensors = [None if i in self.links else tensor for i, tensor in enumerate(self._tensors)]

    def release(self) -> None:
        """Hold nothing any more."""
        self._tensors = []
        self._copies, self._values = {}, {}

    def offload(self, numbers: Sequence[int]) -> list[OffloadedStorage]:
        """The storages under some of the tensors, which may leave the device; those changed in place since stay."""
        views: dict[int, OffloadableTensor] = {}
        for i in numbers:
            tensor = self._tensors[i]
            if isinstance(tensor, Tensor) and version_of(tensor) == self._versions[i]:
                self._tensors[i] = views.setdefault(id(tensor), OffloadableTensor(tensor))
        return input_storages(list(views.values()))


class StageOutput:
    """What a stage returned, as far as it is alive and as it was then: what the next stage takes may be it.

    Args:
        tensors: in the output.
    """

    __slots__ = ("_references", "_states")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors]
        self._states = [_state_of(tensor) for tensor in tensors]

    def links_to(self, inputs: Sequence[Tensor], expected: set[int]) -> tuple[dict[int, int], bool]:
        """Which of the expected input tensors are in it, by their numbers, and whether one was changed since."""
        numbers = {id(tensor): j for j, reference in enumerate(self._references) if (tensor := reference()) is not None}
        same = {i: numbers[id(tensor)] for i, tensor in enumerate(inputs) if i in expected and id(tensor) in numbers}
        links = {i: j for i, j in same.items() if _state_of(inputs[i]) == self._states[j]}
        return links, len(links) < len(same)


def _state_of(tensor: Tensor) -> tuple[int, int]:
    return version_of(tensor), storage_key(tensor)
