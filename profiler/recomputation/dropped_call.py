"""One call of a stage that keeps nothing of its own for backward: it runs again when backward asks for that."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from profiler.recomputation.host_copies import uncounted_copy
from profiler.recomputation.module_rerun import (
    CallState,
    detached,
    rerun_dropping,
    rerun_until_saved,
    with_other_history,
)
from profiler.recomputation.outer_hooks import SavedParameters
from profiler.recomputation.saved_tensors import (
    RerunError,
    SavedTensor,
    TensorStandIn,
    is_parameter_like,
    unpack,
)
from profiler.tensors.tensor_trees import device_of, tensors_in, with_tensors, without_tensors
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class DroppedCall:
    """Runs a call so that what it saves is made again in backward, but for what others hold as well.

    On the device it holds no more than the call itself would: inputs that it does not save are copied to host memory.
    Needs no plan: profiling runs stages so where a whole step does not fit.

    Args:
        module: that is called.
        held: numbers of the saved tensors that stay.
        inputs: numbers of the input tensors that are there anyway, or saved by the call; None for all.
        changing: as for ``CallState``.
    """

    def __init__(
        self,
        module: nn.Module,
        held: Collection[int],
        inputs: Collection[int] | None = None,
        changing: Collection[str] = (),
    ) -> None:
        self._module, self._held, self._kept_inputs, self._changing = module, held, inputs, changing
        self._forward: Callable[..., Any] | None = None
        self._arguments: Any = None
        self._inputs: list[_Input | _LinkedInput] = []
        self._state: CallState | None = None
        self._saved: list[Callable[[], _Dropped | None]] = []
        self._before: DroppedCall | None = None
        self._links: Mapping[int, int] = {}

    def take_from(self, before: DroppedCall, links: Mapping[int, int]) -> None:
        """Hold no input that another dropped call returned: that one runs again for it.

        Args:
            before: the other call.
            links: for numbers of input tensors, which output of it each one is.
        """
        self._before, self._links = before, links

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The first run; returns what it returns."""
        self._forward = forward
        self._state = CallState(self._module, device_of((args, kwargs)), draws_random=True, changing=self._changing)
        self._arguments = without_tensors((args, kwargs))
        kept = self._kept_inputs
        with torch._C._DisableTorchDispatch():
            self._inputs = [
                _LinkedInput(tensor)
                if number in self._links
                else _Input(tensor, copied=kept is not None and number not in kept)
                for number, tensor in enumerate(tensors_in((args, kwargs)))
            ]
        parameters = SavedParameters()

        def pack(tensor: Tensor) -> TensorStandIn:
            number = len(self._saved)
            if is_parameter_like(tensor):
                self._saved.append(_nothing)
                return parameters.stand_in(tensor)
            if number in self._held:
                self._saved.append(_nothing)
                with torch._C._DisableTorchDispatch():
                    return SavedTensor(tensor.detach())
            dropped = _Dropped(self)
            self._saved.append(weakref.ref(dropped))
            return dropped

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = forward(*args, **kwargs)
        parameters.pass_on()
        return output

    def make_again(self) -> None:
        """Run again, and hand each saved tensor that backward may still ask for to its place.

        Raises:
            RerunError: the second run saves fewer tensors.
        """
        assert self._state is not None and self._forward is not None
        numbers = itertools.count()
        args, kwargs = self._given(self._outputs_before())
        saved = rerun_until_saved(
            self._forward, self._state, args, kwargs, len(self._saved), lambda _: self._needs(next(numbers))
        )
        if len(saved) != len(self._saved):
            raise RerunError(f"expected {len(self._saved)} saved tensors, got {len(saved)} in its second run")
        for reference, tensor in zip(self._saved, saved, strict=True):
            if (place := reference()) is not None:
                place.value = tensor
        self._saved, self._inputs, self._arguments, self._state, self._forward = [], [], None, None, None
        self._before = None

    def _outputs_before(self) -> list[Tensor]:
        """What the call before returns: it runs again, and those before it from the last one whose inputs are held."""
        calls: list[DroppedCall] = []
        call = self
        while call._before is not None:
            call = call._before
            calls.append(call)
        outputs: list[Tensor] = []
        for call in reversed(calls):
            if call._state is None or call._forward is None:
                raise RerunError("expected stages to be used in backward in the reverse order of their forward")
            args, kwargs = call._given(outputs)
            outputs.clear()
            outputs = tensors_in(rerun_dropping(call._forward, call._state, args, kwargs))
            del args, kwargs
        return outputs

    def _given(self, outputs: Sequence[Tensor]) -> tuple[Any, Any]:
        """The arguments; ``outputs`` are those of the call before."""
        tensors = [
            each.tensor(outputs[self._links[number]]) if isinstance(each, _LinkedInput) else each.tensor()
            for number, each in enumerate(self._inputs)
        ]
        return with_tensors(self._arguments, tensors)

    def _needs(self, number: int) -> bool:
        return number < len(self._saved) and self._saved[number]() is not None


class _Input:
    """An input tensor: held, or copied to host memory."""

    __slots__ = ("_copy", "_device", "_has_history", "_requires_grad", "_tensor")

    def __init__(self, tensor: Tensor, *, copied: bool) -> None:
        self._copy = uncounted_copy(tensor, math.inf) if copied else None
        self._tensor = detached(tensor) if self._copy is None else None
        self._device = tensor.device
        self._has_history, self._requires_grad = tensor.grad_fn is not None, tensor.requires_grad

    def tensor(self) -> Tensor:
        """The tensor, as an input of a second run."""
        if self._tensor is not None:
            return self._tensor
        assert self._copy is not None
        with torch._C._DisableTorchDispatch():
            made = self._copy.on(self._device)
            return with_other_history(made) if self._has_history else made.requires_grad_(self._requires_grad)


class _LinkedInput:
    """An input tensor that another call makes again."""

    __slots__ = ("_has_history",)

    def __init__(self, tensor: Tensor) -> None:
        self._has_history = tensor.grad_fn is not None

    def tensor(self, made: Tensor) -> Tensor:
        with torch._C._DisableTorchDispatch():
            return with_other_history(made) if self._has_history else made.detach()


class _Dropped:
    """Stands in the graph for a saved tensor that is made again."""

    __slots__ = ("__weakref__", "_call", "value")

    def __init__(self, call: DroppedCall) -> None:
        self._call = call
        self.value: Tensor | None = None

    def tensor(self) -> Tensor:
        if self.value is None:
            self._call.make_again()
        assert self.value is not None
        return self.value


def _nothing() -> None:
    """Stands for the reference to a saved tensor that stays."""
