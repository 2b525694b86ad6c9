"""One call that keeps nothing of its own for backward: it is recomputed when backward asks for what it saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from profiler.recomputation.held_inputs import HeldInput
from profiler.recomputation.module_rerun import (
    CallState,
    Saw,
    rerun_dropping,
    rerun_keeping,
    rerun_until_saved,
)
from profiler.recomputation.saved_tensors import (
    RerunError,
    SavedParameters,
    SavedTensor,
    TensorStandIn,
    is_parameter_like,
    unpack,
)
from profiler.records import RecomputeMode
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_trees import device_of, in_new_containers, tensors_in

leave_uncompiled(__name__)


class Placeholder:
    """Stands in the graph for a tensor that a dropped call would have saved; holds it once that is recomputed.

    The autograd node owns it, so its tensor is released exactly when autograd releases a saved tensor: after the
    node ran, or with the graph.
    """

    __slots__ = ("__weakref__", "call", "value")

    def __init__(self, call: DroppedCall) -> None:
        self.call = call
        self.value: Any = None

    def tensor(self) -> Tensor:
        """The tensor; its call is recomputed where it is not there yet."""
        return unpack(self.filled())

    def filled(self) -> Any:
        """Returns what it holds; its call is recomputed where it is not there yet."""
        if self.value is None:
            self.call.recompute()
        assert self.value is not None
        return self.value


class Recomputed(NamedTuple):
    """The output of the latest recomputation of a call; emptied once the next call has taken its input from it."""

    call: DroppedCall
    tensors: list[Tensor]


class DroppedCall:
    """One call: its input, its surroundings, and the placeholders of its saved tensors.

    The placeholders own it, and it owns the call before as long as that may have to make its input. Without a plan it
    is recomputed as backward first asks for something: profiling runs stages so where a whole step does not fit.

    Args:
        module, forward: the called module, and the forward that runs.
        changing: the same as for ``CallState``.
        held: numbers of the saved tensors that stay.

    Attributes:
        done: whether its saved tensors are there again.
        input: the arguments, after ``hold_input``.
        previous: the call that makes those of its inputs that are not held.
    """

    holds_more = False  # The linked input is held from now on, where it is recomputed for another call.

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        changing: Collection[str] = (),
        held: Collection[int] = (),
    ) -> None:
        self.done = False
        self.input: HeldInput
        self.previous: DroppedCall | None = None
        self._module, self._forward = module, forward
        self._changing, self._held = changing, held
        self._state: CallState | None = None
        self._placeholders: list[Callable[[], Placeholder | None]] = []

    # Forward -----------------------------------------------------------------

    def hold_input(
        self,
        arguments: Any,
        before: DroppedCall | None = None,
        links: Mapping[int, int] | None = None,
        on_device: Collection[int] | None = None,
    ) -> None:
        """Hold the arguments, but for those that the call before makes again.

        Args:
            arguments: the arguments of the first run.
            before: the call before.
            links, on_device: the same as for ``HeldInput``.
        """
        self.previous = before if links else None
        self.input = HeldInput(arguments, tensors_in(arguments), links or {}, on_device=on_device)

    def run_first(self, args: Any, kwargs: Any) -> Any:
        """The first run: autograd gets placeholders in place of what it saves."""
        self._state = CallState(self._module, device_of((args, kwargs)), draws_random=True, changing=self._changing)
        return self._run_saving_placeholders(args, kwargs)

    def _run_saving_placeholders(
        self, args: Any, kwargs: Any, note: Callable[[Tensor, bool], None] | None = None
    ) -> Any:
        """Runs forward; calls ``note`` with each saved tensor, and whether it is a parameter."""
        parameters, placeholders, held = SavedParameters(), self._placeholders, self._held

        def pack(tensor: Tensor) -> TensorStandIn:
            is_parameter = is_parameter_like(tensor)
            if note is not None:
                note(tensor, is_parameter)
            if is_parameter:
                placeholders.append(_gone)  # It is there anyway. Its place in the order still counts.
                return parameters.stand_in(tensor)
            if held and len(placeholders) in held:
                placeholders.append(_gone)
                with torch._C._DisableTorchDispatch():
                    return SavedTensor(tensor.detach())
            placeholder = Placeholder(self)
            placeholders.append(weakref.ref(placeholder))
            return placeholder

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = self._forward(*args, **kwargs)
        parameters.pass_on()
        return output

    # Backward ----------------------------------------------------------------

    @property
    def needed(self) -> bool:
        """Whether backward will ask for anything that is not there yet."""
        return not self.done and any(reference() is not None for reference in self._placeholders)

    def recompute(self) -> None:
        """Recomputes its saved tensors: backward asks for them."""
        self.run_again("until_saved")

    def run_again(self, mode: RecomputeMode, before: Recomputed | None = None) -> Recomputed | None:
        """Recompute the call, and before it those that make its input, from the last one whose input is held.

        Args:
            mode: the mode of recomputing this call.
            before: the recomputation directly before.

        Returns:
            Its output; None where it was stopped once all was saved.

        Raises:
            RerunError: it does not repeat its first run, or its input is gone.
        """
        calls: list[DroppedCall] = [self]
        while not calls[-1].input.is_whole and (before is None or before.call is not calls[-1].previous):
            previous = calls[-1].previous
            if previous is None or previous.done:
                raise RerunError("backward uses stages in another order than the reverse of their forward")
            calls.append(previous)
        for call in reversed(calls[1:]):
            before = call._run_on(before, "drop")
        return self._run_on(before, mode)

    def _run_on(self, before: Recomputed | None, mode: RecomputeMode) -> Recomputed | None:
        inputs = self._inputs([] if before is None else before.tensors)
        if before is not None:
            before.tensors.clear()  # What else the call before returned goes now, as it does in a first forward.
        args, kwargs = self.input.arguments(inputs)
        saved, output = self._recomputed(mode, args, kwargs)
        if mode == "drop" and self.holds_more:
            self.input.hold(inputs)
        if saved is not None:
            self._fill(saved)
        return None if mode == "until_saved" else Recomputed(self, tensors_in(output))

    def _inputs(self, linked: Sequence[Tensor]) -> list[Tensor]:
        """Every input tensor: held, or among what the call before returned."""
        return self.input.tensors(linked)

    def _recomputed(self, mode: RecomputeMode, args: Any, kwargs: Any) -> tuple[Sequence[Any] | None, Any]:
        """Recompute the call; returns what it saves (None where nothing is to be kept) and its output.

        Raises:
            RerunError: the saved tensors are not those of the first run.
        """
        saved, output = self._run_module(mode, args, kwargs, self._still_needed())
        if saved is not None and len(saved) != len(self._placeholders):
            raise RerunError(
                f"its recomputation saved {len(saved)} tensors for backward, the first run {len(self._placeholders)}; "
                "let its forward save the same tensors in every call"
            )
        return saved, output

    def _run_module(self, mode: RecomputeMode, args: Any, kwargs: Any, saw: Saw) -> tuple[list[Tensor] | None, Any]:
        assert self._state is not None
        call = self._forward, self._state, in_new_containers(args), in_new_containers(kwargs)
        if mode == "drop":
            return None, rerun_dropping(*call)
        if mode == "until_saved":
            return rerun_until_saved(*call, len(self._placeholders), saw), None
        return rerun_keeping(*call, saw)

    def _still_needed(self) -> Saw:
        """Returns a function that tells of each recomputed tensor, in order, whether the graph still needs it."""
        references = iter(self._placeholders)
        return lambda _: next(references, _gone)() is not None

    def _fill(self, saved: Sequence[Any]) -> None:
        """Puts the recomputed tensors into the graph; nothing else of the call is needed then."""
        for reference, tensor in zip(self._placeholders, saved, strict=True):
            placeholder = reference()
            if placeholder is not None:
                placeholder.value = tensor
        self.done = True
        self.input.release()
        self.previous = self._state = None


def _gone() -> None:
    """Stands for the weak reference to a placeholder that never was."""
