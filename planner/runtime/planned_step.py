"""The runtime of a planned step: frames that drop what a stage saves and make it again when backward asks."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.plans.lowering import LoweredSchedule, Rerun
from planner.plans.plan import Plan, PlannedStage
from planner.runtime.copy_engine import CopyEngine
from planner.runtime.offload_matching import SavedTensorLog, offloaded_inputs
from planner.runtime.offloaded_tensors import OffloadableTensor, OffloadedStorage
from planner.runtime.transfers import TransferExecutor, before_backward
from profiler.recomputation.module_rerun import (
    CallState,
    CallTraits,
    detached,
    rerun_dropping,
    rerun_keeping,
    rerun_until_saved,
)
from profiler.recomputation.op_tape import RecomputedTensor
from profiler.recomputation.selection import Selection
from profiler.recomputation.selective_call import SavedTensor, SelectiveCall, rerun_selecting, unpack
from profiler.workload.autograd_nodes import next_node
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_trees import device_of, tensors_in, with_tensors, without_tensors

leave_uncompiled(__name__)


class PlannedStep:
    """One forward of a planned model, and what its backward will need."""

    def __init__(
        self,
        plan: Plan,
        lowered: LoweredSchedule,
        selections: dict[tuple[int, int], Selection],
        diverged_stages: set[int],
        engine: CopyEngine | None = None,
    ) -> None:
        self.plan = plan
        self.lowered = lowered
        self.selections = selections
        # Selective stages that were seen to run other ops than when profiled: they are recomputed whole.
        self.diverged_stages = diverged_stages
        self.frames: dict[int, weakref.ref[DroppedStage]] = {}
        self._last: tuple[int, DroppedStage, list[weakref.ref[Tensor]]] | None = None
        self.transfers: TransferExecutor | None = None
        if engine is not None and lowered.transfers:
            self.transfers = TransferExecutor(plan, lowered, engine, self.frames, _warn_once)
        self._left = next_node()

    def run(self, position: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run stage ``position`` for the first time, keeping on the device nothing but what the plan says."""
        if self.transfers is None:
            first = next_node()
            output = self._run(position, module, forward, args, kwargs)
            if position in self.frames:
                self._watch(position, tensors_in(output), first)
            return output
        self.transfers.forward_done(position - 1)
        if position and self.plan.stages[position - 1].kind == "outside":
            self._watch(position - 1, tensors_in((args, kwargs)), self._left)
        first = next_node()
        output = self._run(position, module, forward, args, kwargs)
        self.transfers.forward_done(position)
        self._watch(position, tensors_in(output), first)
        self._left = next_node()
        return output

    def leave(self, output: Any) -> None:
        """The model's forward is over, and has returned this."""
        if self.transfers is not None:
            last = len(self.plan.stages) - 1
            self.transfers.forward_done(last)
            self._watch(last, tensors_in(output), self._left)

    def _watch(self, position: int, outputs: Sequence[Tensor], first: int) -> None:
        before_backward(outputs, first, functools.partial(self._backward_begins, position))

    def _backward_begins(self, position: int) -> None:
        """The gradient of a stage's output has come: it runs again now, beside no other gradient of its own."""
        reference = self.frames.get(position)
        frame = None if reference is None else reference()
        if frame is not None and frame.needed:
            frame.materialise()
        elif self.transfers is not None and (frame is None or frame.done):
            self.transfers.backward_begins(position)
            self.transfers.arrive(position)

    def _run(self, position: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if position in self.lowered.selective and position not in self.diverged_stages:
            return self._run_selective(position, module, forward, args, kwargs)
        if position not in self.lowered.dropped and position not in self.diverged_stages:
            return self._run_kept(position, forward, args, kwargs)
        frame = DroppedStage(self, position, module, forward)
        frame.take((args, kwargs), self._before(position))
        output = frame.run_first(args, kwargs)
        self.frames[position] = weakref.ref(frame)
        self._last = (position, frame, [weakref.ref(tensor) for tensor in tensors_in(output)])
        return output

    def _run_selective(
        self, position: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        _check_shapes(self.plan.stages[position], tensors_in((args, kwargs)))
        option = self.lowered.selective[position]
        saves = SavedTensorLog() if self.travels(position, option) else None
        selection = self.selections[position, option]
        call = (
            SelectiveCall(module, selection)
            if saves is None
            else SelectiveCall(module, selection, OffloadableTensor, saves.note)
        )
        output = call.run(forward, args, kwargs)
        self.check_followed(position, call)
        if saves is not None:
            self.load(position, option, saves.pieces(), call)
        return output

    def _run_kept(self, position: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.travels(position, 0):
            return forward(*args, **kwargs)
        _check_shapes(self.plan.stages[position], tensors_in((args, kwargs)))
        saves = SavedTensorLog()
        with torch.autograd.graph.saved_tensors_hooks(saves.pack, unpack):
            output = forward(*args, **kwargs)
        self.load(position, 0, saves.pieces())
        return output

    def travels(self, position: int, option: int | None) -> bool:
        """Whether anything of a stage is to be sent to host memory."""
        return self.transfers is not None and self.transfers.travels(position, option)

    def load(self, position: int, option: int, saved: Sequence[Any], call: SelectiveCall | None = None) -> None:
        """A run of a stage has kept these saved tensors."""
        assert self.transfers is not None
        self.transfers.load(
            position, option, [each if isinstance(each, OffloadableTensor) else None for each in saved], call
        )

    def check_followed(self, position: int, call: SelectiveCall) -> None:
        """Where a stage ran other ops than when profiled, say so once, and recompute it whole from now on."""
        if call.diverged is None:
            return
        stage = self.plan.stages[position]
        instead = "is kept" if not stage.recomputable else "is recomputed as a whole from the next step on"
        _warn_once(
            stage.name,
            f"it runs other ops than when profiled (from its {call.diverged + 1}. watched op on); it {instead}",
        )
        if stage.recomputable:
            self.diverged_stages.add(position)

    def _before(self, position: int) -> tuple[DroppedStage, list[Tensor | None]] | None:
        """The frame of the stage directly before, with its outputs as far as they are alive."""
        if self._last is None or self._last[0] != position - 1:
            return None
        return self._last[1], [reference() for reference in self._last[2]]

    def finish(self) -> None:
        """The forward is over: only the graph holds frames from now on."""
        self._last = None


class SavedPlaceholder:
    """Stands in the graph for a tensor that a dropped stage would have saved; holds it once it has been made again.

    The autograd node owns it, so what it holds is let go exactly when
    autograd lets go of a saved tensor: after the node ran, or with the graph.
    """

    __slots__ = ("__weakref__", "frame", "value")

    def __init__(self, frame: DroppedStage) -> None:
        self.frame = frame
        self.value: Tensor | SavedTensor | RecomputedTensor | None = None


class DroppedStage:
    """One dropped stage call: its input as far as it is held, its surroundings, and the places of what it saved."""

    def __init__(self, step: PlannedStep, position: int, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.step = step
        self.position = position
        self.stage = step.plan.stages[position]
        self._forward = forward
        self._module = module
        self._state: CallState | None = None
        self._tree: Any = None
        self._leaves: list[Tensor | OffloadableTensor | None] = []
        self._versions: list[int] = []
        self._parameters: list[tuple[Tensor, int]] = []
        self._saved: list[weakref.ref[SavedPlaceholder]] = []
        self._links: dict[int, int] = {}
        self._previous: DroppedStage | None = None
        self.done = False

    # Forward -----------------------------------------------------------------

    def take(self, tree: Any, before: tuple[DroppedStage, list[Tensor | None]] | None) -> None:
        """Take the arguments: hold them, but for linked tensors that the plan drops."""
        lowered = self.step.lowered
        hold_linked = self.position in lowered.holding_input or self.position not in lowered.dropped
        outputs = {} if before is None else {id(t): j for j, t in enumerate(before[1]) if t is not None}
        expected = {i for i, _ in self.stage.links}
        leaves = tensors_in(tree)
        for i, tensor in enumerate(leaves):
            if i in expected and id(tensor) in outputs:
                self._links[i] = outputs[id(tensor)]
        if before is not None and self._links:
            self._previous = before[0]
        if not hold_linked and set(self._links) != expected:
            _warn_once(self.stage.name, "its input is not the output of the stage before, as it was when profiled")
        _check_shapes(self.stage, leaves)
        held = [None if i in self._links and not hold_linked else tensor for i, tensor in enumerate(leaves)]
        self._leaves = detached(held)
        self._versions = [tensor._version for tensor in leaves]
        self._tree = without_tensors(tree)

    def run_first(self, args: Any, kwargs: Any) -> Any:
        """The first forward: autograd gets placeholders in place of what it saves."""
        # Whether it draws is not asked of the profile: a dropout's rate may have been changed since.
        traits = CallTraits(draws_random=True, mutated_buffers=self.stage.mutated_buffers)
        self._parameters = [(parameter, parameter._version) for parameter in self._module.parameters()]
        self._state = CallState(self._module, traits, device_of((args, kwargs)))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            return self._forward(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Tensor | SavedPlaceholder:
        if tensor.is_leaf and tensor.requires_grad:
            self._saved.append(_GONE)  # A parameter: there anyway. Its place in the order still counts.
            return tensor
        saved = SavedPlaceholder(self)
        self._saved.append(weakref.ref(saved))
        return saved

    # Backward ----------------------------------------------------------------

    @property
    def needed(self) -> bool:
        """Whether backward will ask for anything that is not there yet."""
        return not self.done and any(reference() is not None for reference in self._saved)

    def materialise(self) -> None:
        """Make again what this stage saved, and whatever the plan makes along with it."""
        lowered, journey = self.step.lowered, self.step.transfers
        output: tuple[int, list[Tensor]] | None = None
        for number, rerun in enumerate(lowered.reruns.get(self.position, ())):
            if journey is not None:
                journey.backward_begins(self.position, number)
            frame = self._sibling(rerun.stage)
            if frame is not None and not frame.done:
                output = frame._rerun(rerun, output)
        if journey is not None:
            journey.backward_begins(self.position)
        if not self.done:
            # Backward came here in an order the plan does not know (a part of the graph): do what is needed.
            self._rerun(Rerun(self.position, "until_saved", False), None)
        for stage in lowered.input_releases.get(self.position, ()):
            frame = self._sibling(stage)
            if frame is not None:
                frame._release_linked()

    def _sibling(self, position: int) -> DroppedStage | None:
        reference = self.step.frames.get(position)
        return None if reference is None else reference()

    def _rerun(self, rerun: Rerun, output: tuple[int, list[Tensor]] | None) -> tuple[int, list[Tensor]] | None:
        self._check_parameters()
        leaves = self._inputs(output)
        if output is not None:
            output[1].clear()  # What else the stage before returned goes now, as it does in a first forward.
        args, kwargs = with_tensors(self._tree, leaves)
        assert self._state is not None
        if rerun.mode == "until_saved":
            self._fill(rerun_until_saved(self._forward, self._state, args, kwargs, len(self._saved)))
            return None
        if rerun.mode == "keep" and rerun.option:
            result = self._rerun_selecting(rerun.option, args, kwargs)
        elif rerun.mode == "keep":
            saved, result = rerun_keeping(self._forward, self._state, args, kwargs)
            if self.step.travels(self.position, 0):
                saved = [OffloadableTensor(tensor) for tensor in saved]
                self.step.load(self.position, 0, saved)
            self._fill(saved)
        else:
            result = rerun_dropping(self._forward, self._state, args, kwargs)
            if rerun.hold:
                self._leaves = list(leaves)
                self._versions = [tensor._version for tensor in leaves]
        return self.position, tensors_in(result)

    def _rerun_selecting(self, option: int, args: Any, kwargs: Any) -> Any:
        assert self._state is not None
        selection = self.step.selections[self.position, option]
        travels = self.step.travels(self.position, option)
        call, saved, result = rerun_selecting(
            self._forward,
            self._module,
            self._state,
            args,
            kwargs,
            selection,
            OffloadableTensor if travels else SavedTensor,
        )
        self.step.check_followed(self.position, call)
        if travels:
            self.step.load(self.position, option, saved, call)
        self._fill(saved)
        return result

    def offloaded_inputs(self, leaves: Sequence[int]) -> list[OffloadedStorage]:
        """Luggage of input tensors that are held, by their numbers; those that were changed since stay."""
        pieces: dict[int, OffloadableTensor] = {}
        for i in () if self.done else leaves:
            tensor = self._leaves[i]
            if isinstance(tensor, Tensor) and tensor._version == self._versions[i]:
                self._leaves[i] = pieces.setdefault(id(tensor), OffloadableTensor(tensor))
        return offloaded_inputs(list(pieces.values()))

    def _held(self) -> list[Tensor | None]:
        """The input as far as it is held; what is in host memory is brought back."""
        away = [
            isinstance(leaf, OffloadableTensor) and leaf.away for leaf in self._leaves
        ]  # All pieces of a storage come at once.
        for i, leaf in enumerate(self._leaves):
            if isinstance(leaf, OffloadableTensor):
                self._leaves[i] = tensor = leaf.tensor() if away[i] else leaf.value
                self._versions[i] = tensor._version if away[i] else self._versions[i]
        return [None if isinstance(leaf, OffloadableTensor) else leaf for leaf in self._leaves]

    def _inputs(self, output: tuple[int, list[Tensor]] | None) -> list[Tensor]:
        """Every input tensor: held, or from the stage before, which is run again where need be."""
        held = self._held()
        if None not in held:
            self._check_versions(held)
            return [tensor for tensor in held if tensor is not None]
        assert self._previous is not None
        if output is None or output[0] != self._previous.position:
            output = self._previous._rerun(Rerun(self._previous.position, "drop", False), None)
            assert output is not None
        return [output[1][self._links[i]] if tensor is None else tensor for i, tensor in enumerate(held)]

    def _check_parameters(self) -> None:
        now = list(self._module.parameters())
        same = len(now) == len(self._parameters) and all(
            a is b and a._version == version for a, (b, version) in zip(now, self._parameters, strict=True)
        )
        if not same:
            raise RuntimeError(
                f"stage {self.stage.name!r}: expected its parameters to be as they were in forward, got changed or "
                "other ones; call backward before the optimizer steps or parameters are replaced"
            )

    def _check_versions(self, held: Sequence[Tensor | None]) -> None:
        for tensor, version in zip(held, self._versions, strict=True):
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    f"stage {self.stage.name!r}: expected its input to be as it was in forward, got one that was "
                    "changed in place since; leave this stage out of the plan or change a copy"
                )

    def _fill(self, tensors: Sequence[Tensor | SavedTensor | RecomputedTensor]) -> None:
        if len(tensors) != len(self._saved):
            raise RuntimeError(
                f"stage {self.stage.name!r}: expected {len(self._saved)} tensors saved for backward as in forward, "
                f"got {len(tensors)}; it depends on something that changed in between"
            )
        for reference, tensor in zip(self._saved, tensors, strict=True):
            saved = reference()
            if saved is not None:
                saved.value = tensor
        self.done = True
        self._leaves = []
        self._parameters = []
        self._previous = None

    def _release_linked(self) -> None:
        if not self.done and self._previous is not None:
            self._leaves = [None if i in self._links else t for i, t in enumerate(self._leaves)]


def _unpack(packed: Tensor | SavedPlaceholder) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if packed.value is None:
        packed.frame.materialise()
    assert packed.value is not None
    return unpack(packed.value)


def _gone() -> None:
    return None


_GONE: Any = _gone
_WARNED: set[tuple[str, str]] = set()


def _check_shapes(stage: PlannedStage, tensors: Sequence[Tensor]) -> None:
    if stage.input_shapes and [tuple(t.shape) for t in tensors] != list(stage.input_shapes):
        _warn_once(stage.name, "its input has other shapes than when profiled; the peak is not promised")


def _warn_once(stage: str, what: str) -> None:
    if (stage, what) not in _WARNED:
        _WARNED.add((stage, what))
        warnings.warn(f"planned stage {stage!r}: {what}", RuntimeWarning, stacklevel=3)
