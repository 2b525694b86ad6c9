"""What a call changes besides its output, found by looking before and after."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from profiler.tensors.tensor_memory import same_values
from profiler.tensors.tensor_parts import is_dense
from profiler.tensors.tensor_trees import objects_in, tensors_in
from profiler.workload.snapshot import RandomState


class CallChanges:
    """What a call changes besides its output: its inputs, random generators, buffers and parameters."""

    def __init__(self, module: nn.Module, arguments: Any, persistent: list[Tensor]) -> None:
        self._module = module
        self.arguments = arguments
        self.inputs = [(tensor, tensor._version) for tensor in tensors_in(arguments)]
        self._objects = [(value, tensors_in(value)) for value in objects_in(arguments)]
        self.random = RandomState.capture()
        self._buffers = {name: (b, b.clone()) for name, b in module.named_buffers()}
        of_module = {id(buffer) for buffer, _ in self._buffers.values()}
        self._others = [(tensor, tensor._version) for tensor in persistent if id(tensor) not in of_module]

    def inputs_changed(self) -> bool:
        """Whether an input was changed in place."""
        return _were_changed(self.inputs)

    def filled(self, output: Any) -> str:
        """Class of an object in its inputs that has tensors now that it had not, and that are not in the output."""
        returned = {id(tensor) for tensor in tensors_in(output)}
        for value, before in self._objects:
            if {id(tensor) for tensor in tensors_in(value)} - {id(tensor) for tensor in before} - returned:
                return type(value).__name__
        return ""

    def changed_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that are others now, or hold something else."""
        now = dict(self._module.named_buffers())
        return tuple(
            name
            for name, (buffer, value) in self._buffers.items()
            if now.get(name) is not buffer or not same_values(buffer, value)
        )

    def side_effect(self) -> str:
        """What else it changed that a second run would change again; empty for nothing."""
        if _were_changed(self._others):
            return "it changes a parameter, or a buffer of another module"
        if any(not is_dense(self._buffers[name][0]) for name in self.changed_buffers()):
            return "it changes a buffer that is sparse, nested or quantized"
        if self.random.host_differs():
            return "it draws from Python's or numpy's random generator"
        return ""


def _were_changed(tensors: list[tuple[Tensor, int]]) -> bool:
    return any(tensor._version != version for tensor, version in tensors)
