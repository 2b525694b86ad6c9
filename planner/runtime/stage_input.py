"""The arguments of a stage call, held until it runs again, in host memory meanwhile, or made by the stage before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from planner.runtime.offload_matching import input_storages
from planner.runtime.offloaded_tensors import OffloadableTensor, OffloadedStorage
from profiler.recomputation.module_rerun import detached
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_trees import with_tensors, without_tensors

leave_uncompiled(__name__)


class StageInput:
    """What a dropped stage needs to run again.

    Args:
        stage_name: for errors.
        arguments: of the call.
        tensors: all that are in the arguments, in order.
        links: number of an input tensor -> number of the output of the stage before that it is.
        hold_linked: whether linked tensors are held as well; else the stage before makes them again.
    """

    __slots__ = ("_arguments", "_stage_name", "_tensors", "_versions", "links")

    def __init__(
        self, stage_name: str, arguments: Any, tensors: Sequence[Tensor], links: dict[int, int], hold_linked: bool
    ) -> None:
        self.links = links
        self._stage_name = stage_name
        self._arguments = without_tensors(arguments)
        held = [None if i in links and not hold_linked else tensor for i, tensor in enumerate(tensors)]
        self._tensors: list[Tensor | OffloadableTensor | None] = detached(held)
        self._versions = [tensor._version for tensor in tensors]

    def held(self) -> list[Tensor | None]:
        """The tensors that are held, None for the others; what is in host memory is brought back."""
        # All views of a storage come back at once: which are in host memory is asked before.
        offloaded = [isinstance(tensor, OffloadableTensor) and tensor.offloaded for tensor in self._tensors]
        for i, tensor in enumerate(self._tensors):
            if isinstance(tensor, OffloadableTensor):
                self._tensors[i] = fetched = tensor.tensor() if offloaded[i] else tensor.value
                self._versions[i] = fetched._version if offloaded[i] else self._versions[i]
        return [None if isinstance(tensor, OffloadableTensor) else tensor for tensor in self._tensors]

    def check_unchanged(self, tensors: Sequence[Tensor]) -> None:
        """Refuse held tensors that were changed in place since the first run."""
        if any(tensor._version != version for tensor, version in zip(tensors, self._versions, strict=True)):
            raise RuntimeError(
                f"stage {self._stage_name!r}: expected its input to be as it was in forward, got one that was "
                "changed in place since; leave this stage out of the plan or change a copy"
            )

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """The positional and keyword arguments with these tensors in their places."""
        return with_tensors(self._arguments, tensors)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Hold these from now on."""
        self._tensors = list(tensors)
        self._versions = [tensor._version for tensor in tensors]

    def release_linked(self) -> None:
        """Hold no linked tensors any more."""
        self._tensors = [None if i in self.links else tensor for i, tensor in enumerate(self._tensors)]

    def release(self) -> None:
        """Hold nothing any more."""
        self._tensors = []

    def offload(self, numbers: Sequence[int]) -> list[OffloadedStorage]:
        """The storages under some of the tensors, which may leave the device; those changed in place since stay."""
        views: dict[int, OffloadableTensor] = {}
        for i in numbers:
            tensor = self._tensors[i]
            if isinstance(tensor, Tensor) and tensor._version == self._versions[i]:
                self._tensors[i] = views.setdefault(id(tensor), OffloadableTensor(tensor))
        return input_storages(list(views.values()))


def links_between(outputs: Sequence[Tensor | None], inputs: Sequence[Tensor], expected: set[int]) -> dict[int, int]:
    """Which of the expected input tensors are outputs of the stage before, by their numbers."""
    numbers = {id(tensor): j for j, tensor in enumerate(outputs) if tensor is not None}
    return {i: numbers[id(tensor)] for i, tensor in enumerate(inputs) if i in expected and id(tensor) in numbers}
