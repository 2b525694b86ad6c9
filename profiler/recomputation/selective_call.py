"""One call of a stage that keeps a choice of what it saves; the rest is made again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from profiler.recomputation.module_rerun import NOT_NEEDED, CallState, Saw, detached, emptied
from profiler.recomputation.op_tape import OpTape, Watch
from profiler.recomputation.outer_hooks import SavedParameters
from profiler.recomputation.recording_mode import RecordingMode
from profiler.recomputation.saved_tensors import (
    RecordedInput,
    SavedTensor,
    TensorStandIn,
    is_there_anyway,
    unpack,
)
from profiler.recomputation.selection import Selection
from profiler.recomputation.tape_program import Prepared
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class SelectiveCall:
    """One call of a stage under a selection.

    Args:
        module: the stage.
        selection: which of its ops run again.
        keep: what stands in the graph for a tensor that is kept.
        note: is told what stands there for each saved tensor, in order.

    Attributes:
        diverged: the op at which the call ran another one than the selection
            expects; None where it followed. From there on everything is kept.
        ended_early: it followed, but ended before the last of those ops: it took a shorter way.
    """

    def __init__(
        self,
        module: nn.Module,
        selection: Selection,
        keep: Callable[[Tensor], TensorStandIn] = SavedTensor,
        note: Callable[[TensorStandIn], None] | None = None,
    ) -> None:
        self.diverged: int | None = None
        self.ended_early = False
        self.selection = selection
        self._keep, self._note = keep, note
        self._tape = OpTape()
        self._mode = RecordingMode(self._tape, module, selection)
        self._parameters = SavedParameters()

    def watch_reruns(self, watch: Watch) -> None:
        """Have each op told, by its position in the selection, before it runs again; and None when some have."""
        self._tape.watch = watch

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the call and return its output."""
        return self._run(call, args, kwargs, torch.autograd.graph.saved_tensors_hooks(self._pack, unpack))

    def run_for_saved(
        self, call: Callable[..., Any], args: Any, kwargs: Any, saw: Saw | None = None
    ) -> tuple[list[TensorStandIn], Any]:
        """Run the call for what it would save, in order; its own graph must not be walked.

        Args:
            call, args, kwargs: what to run.
            saw: is told of each tensor that is saved.
        """
        saved: list[TensorStandIn] = []

        def pack(tensor: Tensor) -> None:
            with self._mode.not_recording(tensor):
                needed = saw is None or saw(tensor)
            saved.append(self._pack(tensor) if needed else SavedTensor(NOT_NEEDED))

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = detached(self._run(call, args, kwargs, None))
        return emptied(saved), output

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any, hooks: Any) -> Any:
        shapes = tuple(value.shape for value in args if isinstance(value, Tensor))
        self._tape.prepared = prepared_for(self.selection, shapes)
        with self._mode.switching(hooks):
            output = self._mode.run_stage(call, args, kwargs)
        self.diverged, self.ended_early = self._mode.end_call()
        self._tape.end_recording()
        self._parameters.pass_on()
        return output

    def settle(self, saved: Sequence[TensorStandIn]) -> None:
        """What the call has changed in place is put back, for those that hold it, too."""
        self._tape.settle_inputs()
        for kept in saved:
            if isinstance(kept, SavedTensor):
                kept.settle()

    def held_tensors(self) -> list[Tensor]:
        """What the ops that run again hold until then."""
        return [tensor for recorded in self._tape.inputs() if (tensor := recorded.held) is not None]

    def recorded_inputs(self) -> list[tuple[int, RecordedInput]]:
        """What the ops that run again hold until then, each with the op's position in the selection.

        For after the call; each may be passed on.
        """
        return self._tape.recorded_inputs()

    def _pack(self, tensor: Tensor) -> TensorStandIn:
        packed = self._packed(tensor)
        if self._note is not None:
            self._note(packed)
        return packed

    def _packed(self, tensor: Tensor) -> TensorStandIn:
        if is_there_anyway(tensor):  # What is no parameter is of the batch, and may be offloaded.
            return self._parameters.stand_in(tensor) if isinstance(tensor, nn.Parameter) else self._keep(tensor)
        recomputed = self._tape.placeholder_of(tensor)
        if recomputed is not None:
            return recomputed
        with self._mode.not_recording(tensor):
            return self._keep(tensor.detach())


@functools.lru_cache(maxsize=256)
def prepared_for(selection: Selection, shapes: tuple[torch.Size, ...]) -> Prepared:
    """What calls under a selection have prepared for those with inputs of the same shapes, stages alike share it."""
    return Prepared()


def rerun_selecting(
    call: Callable[..., Any],
    module: nn.Module,
    state: CallState,
    args: Any,
    kwargs: Any,
    selection: Selection,
    keep: Callable[[Tensor], TensorStandIn] = SavedTensor,
    saw: Saw | None = None,
) -> tuple[SelectiveCall, list[TensorStandIn], Any]:
    """Run a call again under a selection: the run, what it saves in order, and the output cut off from the graph."""
    with state.reinstated(), torch.enable_grad():
        selective = SelectiveCall(module, selection, keep)  # Inside: it remembers the flags for ops that run later.
        saved, output = selective.run_for_saved(call, args, kwargs, saw)
    selective.settle(saved)
    return selective, saved, output
