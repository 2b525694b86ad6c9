"""A planned stage that keeps nothing for backward, and is recomputed when the plan's schedule or backward asks for it.

Each recomputation is checked against the first run; one of a program runs the program once more.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.plans.lowering import LoweredSchedule
from planner.plans.plan import Plan, PlannedStage
from planner.runtime.plan_checks import Deviations, PlanWarnings, is_larger, warn_of_a_retained_graph
from planner.runtime.transfers import OffloadableTensor, TransferExecutor
from profiler.recomputation.dropped_call import DroppedCall, Recomputed
from profiler.recomputation.held_inputs import BatchCopies, CallOutput, HeldInput
from profiler.recomputation.module_rerun import (
    NOT_NEEDED,
    CallState,
    copies_of_parameters,
    rerun_dropping,
    with_other_history,
)
from profiler.recomputation.saved_tensors import (
    Geometry,
    RerunError,
    SavedSignature,
    SignatureCheck,
    Values,
    change_counter,
    geometry_of,
    is_undefined,
    signature_of,
    some_values_of,
    tensor_over,
    undefined_memory_shown,
    version_of,
)
from profiler.records import RecomputeMode
from profiler.trace.call_program import CHANGED, BoundProgram, HandedOver, ProgramPlaceholder
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_parts import has_storage, sizes_of, storage_key
from profiler.workload.tensor_trees import device_of, in_new_containers, tensors_in

leave_uncompiled(__name__)


_INPUT_CHANGED = (
    "its input was changed in place after the stage before had returned it, as it was not when profiled; it is held, "
    "and the peak is not promised"
)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Shared by the stages of one planned step.

    Attributes:
        plan, lowered: the applied plan, and what its schedule does at each stage.
        deviations: seen of the model's stages since the plan was applied; more may be added.
        batch: the tensors that the model was given.
        transfers: the step's copies to host memory and back; None where nothing is sent.
        warn: gives the warnings of the plan.
        before_backward: recomputes a stage whose backward begins, with all that the schedule has before it.
    """

    plan: Plan
    lowered: LoweredSchedule
    deviations: Deviations
    batch: BatchCopies
    transfers: TransferExecutor | None
    warn: PlanWarnings
    before_backward: Callable[[DroppedStage], None]

    def sends(self, position: int) -> bool:
        """Whether anything is sent of what a stage keeps."""
        return self.transfers is not None and self.transfers.sends(position, 0)

    def shares(self, position: int) -> bool:
        """Whether others than the next stage hold something of what a stage returns."""
        return self.plan.chain is not None and any(tensor.born == position for tensor in self.plan.chain.shared)

    def check_shapes(self, stage: PlannedStage, inputs: Sequence[Tensor]) -> None:
        """Warn once where the input of a stage has other shapes than when profiled, and the batch does not say so."""
        if self.deviations.other_batch or self.deviations.other_inputs or not stage.record.input_shapes:
            return
        shapes = [*map(sizes_of, inputs)]
        if shapes != list(stage.record.input_shapes):
            self.deviations.other_inputs = True
            larger = is_larger(shapes, stage.record.input_shapes)
            then = "the peak is not promised" if larger else "they are smaller and need less memory"
            self.warn.of_stage(stage.name, f"its input has other shapes than when profiled, {shapes}; {then}")


class DroppedStage(DroppedCall):
    """One call of a dropped stage.

    Args:
        position: place of the stage in the plan.
        module, forward: the called module, and the forward that runs.
        step: its planned step.
        stage: its record, where the plan has none at that position.

    Attributes:
        position, stage: as given.
        boundaries: the boundaries, by the stages behind them, that its input stands for: its own, and those of stages
            that were left out before it.
        held_boundaries: those of them that the schedule holds.
        returns_others: whether a recomputation returned what the first run did not.
    """

    def __init__(
        self,
        position: int,
        module: nn.Module,
        forward: Callable[..., Any],
        step: StepContext,
        stage: PlannedStage | None = None,
    ) -> None:
        self.position, self.stage = position, stage or step.plan.stages[position]
        super().__init__(module, forward, self.stage.record.mutated_buffers)
        self.boundaries = range(position, position + 1)
        self.held_boundaries: set[int] = set()
        self.returns_others = False
        self._step = step
        self._returned: SharedOutputs | None = None
        self._set_parameters: list[Tensor] = []  # by its first run, and what they held before is not known
        self._signatures: list[SavedSignature | None] = []

    # Forward -----------------------------------------------------------------

    def take_input(
        self, arguments: Any, previous: DroppedStage | None, output: CallOutput | None, *, expects_links: bool
    ) -> None:
        """Hold the arguments, but for linked tensors that the plan drops.

        Args:
            arguments: those of the first run.
            previous: the last dropped stage before; those between are left out in this step, or kept.
            output: its output.
            expects_links: the stage before ran in this step, so what it returned is expected as input.
        """
        lowered, inputs = self._step.lowered, tensors_in(arguments)
        expected = {i for i, _ in self.stage.record.links}
        links, changed = ({}, False) if output is None else output.links_to(inputs, expected)
        if links and previous is not None:
            self.previous = previous
            self.boundaries = range(previous.position + 1, self.position + 1)
        self.held_boundaries = set(lowered.holding_input.intersection(self.boundaries))
        hold_linked = bool(self.held_boundaries) or self.position not in lowered.dropped
        if changed and not hold_linked:
            self._step.warn.of_stage(self.stage.name, _INPUT_CHANGED)
        elif expects_links and not hold_linked and links.keys() != expected:
            self._step.warn.of_stage(
                self.stage.name, "its input is not the output of the stage before, as it was when profiled"
            )
        self._step.check_shapes(self.stage, inputs)
        self.input = HeldInput(arguments, inputs, links, hold_linked=hold_linked)

    def run_first(self, args: Any, kwargs: Any) -> Any:
        """The first forward: autograd gets placeholders in place of what it saves."""
        deviations, batch = self._step.deviations, self._step.batch
        checked = deviations.turns.checked(self.position)
        # Whether it draws is not asked of the profile: a dropout's rate may have been changed since.
        device = device_of((args, kwargs))
        self._state = state = CallState(self._module, device, draws_random=True, changing=self._changing)
        undefined = deviations.undefined.get(self.position, ())
        state_storages = state.state_storages() if checked else set()
        copies = {} if self.position in deviations.dropped_stages else copies_of_parameters(self._module)
        deviations.dropped_stages.add(self.position)
        saved_storages: set[int] | None = set() if self.input.holds_of(batch) else None
        signatures = self._signatures

        def note(tensor: Tensor, is_parameter: bool) -> None:
            if saved_storages is not None:
                saved_storages.add(storage_key(tensor))
            if checked:
                # What a buffer holds, the run itself may change.
                values = len(signatures) not in undefined and storage_key(tensor) not in state_storages
                signatures.append(None if is_parameter else signature_of(tensor, values=values))

        noted = checked or saved_storages is not None
        output = self._run_saving_placeholders(args, kwargs, note if noted else None)
        self._note_output(output)
        self._set_parameters = state.first_run_over(copies)
        if saved_storages is not None:
            self.input.copy_batch(batch, saved_storages)
        return output

    def _note_output(self, output: Any) -> None:
        """Remember what the first run returned where others hold some of it."""
        if self._step.shares(self.position):
            self._returned = SharedOutputs(tensors_in(output))

    # Backward ----------------------------------------------------------------

    @property
    def holds_more(self) -> bool:
        """Whether the schedule holds its linked input once that was recomputed."""
        return bool(self.held_boundaries)

    def recompute(self) -> None:
        """Recompute the tensors that this stage saved, and those that the plan recomputes along with it."""
        warn_of_a_retained_graph(self._step.warn)
        self._step.batch.backward_begun = True
        self._step.before_backward(self)

    def release_boundary(self, position: int) -> None:
        """The schedule releases the boundary before a stage, for which the input of this one stands."""
        if not self.done and self.previous is not None:
            self.held_boundaries.discard(position)
            if not self.held_boundaries:
                self.input.release_linked()

    def _run_on(self, before: Recomputed | None, mode: RecomputeMode) -> Recomputed | None:
        try:
            return super()._run_on(before, mode)
        except RerunError as error:
            raise RerunError(f"stage {self.stage.name!r}: {error}") from error

    def _inputs(self, linked: Sequence[Tensor]) -> list[Tensor]:
        inputs = self.input.tensors_as_before(linked)
        if inputs is None:
            raise RerunError(
                "its input was changed in place since forward, so that it cannot be recomputed; change a "
                f'copy, or keep this stage: a rule with modules = {self.stage.name!r} and action = "keep"'
            )
        if isinstance(self.previous, DroppedStage) and self.previous.returns_others and not self.input.is_whole:
            raise RerunError(CHANGED.format("a parameter of the stage before"))
        return inputs

    def _recomputed(self, mode: RecomputeMode, args: Any, kwargs: Any) -> tuple[Sequence[Any] | None, Any]:
        if self._set_parameters:
            raise self._sets_parameters()
        undefined = self._step.deviations.undefined.get(self.position, ())
        check, needed = SignatureCheck(self._signatures, undefined), self._still_needed()

        def checked(tensor: Tensor) -> bool:
            check.saw(tensor)
            return needed(tensor)

        saved, output = self._run_module(mode, args, kwargs, checked if self._signatures else needed)
        if saved is not None:
            if not check.difference and len(saved) != len(self._placeholders):
                check.difference = f"{len(saved)} tensors, not {len(self._placeholders)}"
            if check.difference:
                raise self._not_the_same(check.difference)
            if check.other_values:
                del saved, output  # The run that looks into it must not need more memory than the plan has.
                self._note_undefined(check.other_values, args, kwargs)
                return self._recomputed(mode, args, kwargs)
        return self._placed(mode, saved, output), output

    def _placed(self, mode: RecomputeMode, saved: list[Tensor] | None, output: Any) -> list[Any] | None:
        """Returns what was saved, ready to be sent; outputs that others still hold keep their memory."""
        if self._returned is not None and mode != "until_saved":
            outputs = tensors_in(output)
            self._returned.take_the_place_of(outputs, [*outputs, *(saved or ())])
        transfers = self._step.transfers
        if transfers is None or saved is None or mode != "keep" or not self._step.sends(self.position):
            return saved
        kept = [tensor if tensor is NOT_NEEDED else OffloadableTensor(tensor) for tensor in saved]
        transfers.kept(self.position, 0, [each if isinstance(each, OffloadableTensor) else None for each in kept])
        return kept

    def _note_undefined(self, second: Mapping[int, Values], args: Any, kwargs: Any) -> None:
        """Recompute once more to see whether other values of saved tensors are only memory that nothing filled.

        Raises:
            RerunError: they are not.
        """
        assert self._state is not None
        undefined: set[int] = set()
        numbers = itertools.count()

        def saw(tensor: Tensor) -> bool:
            number = next(numbers)
            expected = self._signatures[number] if number < len(self._signatures) else None
            if number in second and expected is not None and is_undefined(tensor, expected.values, second[number]):
                undefined.add(number)
            return False

        def showing(*args: Any, **kwargs: Any) -> Any:
            with undefined_memory_shown():
                return self._forward(*args, **kwargs)

        rerun_dropping(showing, self._state, in_new_containers(args), in_new_containers(kwargs), saw)
        wrong = sorted(set(second) - undefined)
        if wrong:
            raise self._not_the_same(f"other values in its {wrong[0] + 1}. tensor")
        self._step.deviations.undefined.setdefault(self.position, set()).update(undefined)

    def _not_the_same(self, difference: str) -> RerunError:
        return RerunError(
            f"its recomputation saved other tensors than its forward, {difference}; it depends on something that "
            "changed in between and is not kept by its modules (a global, weights written through .data, a generator "
            f"outside of torch). Change that after backward, or keep this stage: a rule with modules = "
            f'{self.stage.name!r} and action = "keep"'
        )

    def _sets_parameters(self) -> RerunError:
        first = self._set_parameters[0]
        name = next((name for name, parameter in self._module.named_parameters() if parameter is first), "")
        return RerunError(
            f"its forward sets the parameter {name!r} of shape {tuple(first.shape)}, so that it "
            "cannot be recomputed; run one forward before planner.profile and apply, or keep this "
            f'stage: a rule with modules = {self.stage.name!r} and action = "keep"'
        )


class DroppedProgram(DroppedStage):
    """One call of a dropped stage that runs as a program.

    Args:
        program: runs in place of the module's forward.
        position, module, forward, step: as for ``DroppedStage``.
    """

    def __init__(
        self, program: BoundProgram, position: int, module: nn.Module, forward: Callable[..., Any], step: StepContext
    ) -> None:
        super().__init__(position, module, forward, step)
        self._program = program
        self._held_values: list[Values] = []  # of its parameters and buffers, some

    def run_first(self, args: Any, kwargs: Any) -> Any:
        """The first forward: one placeholder stands for all that it hands over to backward."""
        bound, held, batch = self._program, self._program.held(), self._step.batch
        if self._step.deviations.turns.checked(self.position):
            self._held_values = [*map(some_values_of, held)]
        device, draws = device_of((args, kwargs)), bound.program.draws
        self._state = CallState(self._module, device, draws_random=draws, changing=self._changing, inputs=held)
        placeholder = ProgramPlaceholder(self)
        self._placeholders.append(weakref.ref(placeholder))
        output = bound.dropping(placeholder, args, kwargs)
        self._note_output(output)
        if self.input.holds_of(batch):
            inputs = tensors_in((args, kwargs))
            self.input.copy_batch(batch, {storage_key(inputs[n]) for n in bound.program.arguments_in_backward})
        return output

    def _recomputed(self, mode: RecomputeMode, args: Any, kwargs: Any) -> tuple[Sequence[Any] | None, Any]:
        assert self._state is not None
        bound = self._program
        with self._state.reinstated():
            saved = None
            if self._held_values:
                self._check_held()
            if mode == "drop":
                outputs, held = bound.outputs(args, kwargs), []
            else:
                held, outputs = bound.handed_over(args, kwargs)
                saved = [HandedOver(bound.program, held)]
        if self._returned is not None:
            self._returned.take_the_place_of(outputs, [*outputs, *(t for t in held if isinstance(t, Tensor))])
        differentiable = bound.program.differentiable
        return saved, [with_other_history(t) if takes else t for t, takes in zip(outputs, differentiable, strict=True)]

    def _check_held(self) -> None:
        """Compare some values of parameters and buffers with those before the first run.

        Raises:
            RerunError: what the program hands over depends on one that was changed since.
        """
        now = map(some_values_of, self._program.held())
        changed = [k for k, (one, other) in enumerate(zip(now, self._held_values, strict=True)) if one != other]
        if any(k in self._program.program.held_by_backward for k in changed):
            raise RerunError(CHANGED.format("a parameter"))
        self.returns_others = bool(changed)


class SharedOutputs:
    """The last output of a stage, as far as it is still there; this holds no memory of the device.

    A stage that reads a skip connection holds it until its own backward. Where the stage that made it is recomputed
    before, a second one of the same values would lie beside it: what is recomputed takes the memory of the first.

    Args:
        tensors: in the output of a run.
    """

    __slots__ = ("_returned",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._returned = [_Returned(tensor) if _is_plain(tensor) else None for tensor in tensors]

    def take_the_place_of(self, tensors: Sequence[Tensor], views: Iterable[Tensor]) -> None:
        """Have what another run made lie in the memory of these, where they are there and unchanged.

        Args:
            tensors: in the output of that run, which had the same values.
            views: all tensors that hold memory of that run; those that lie in storages of ``tensors`` move.
        """
        found: dict[int, torch.UntypedStorage] = {}
        for number, (returned, tensor) in enumerate(zip(self._returned, tensors, strict=False)):
            storage = returned.storage_for(tensor) if returned is not None else None
            if storage is not None:
                found[storage_key(tensor)] = storage
            elif _is_plain(tensor):
                self._returned[number] = _Returned(tensor)
        if not found:
            return
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            for view in views:
                if _is_plain(view) and (storage := found.get(storage_key(view))) is not None:
                    view.data = tensor_over(storage, geometry_of(view))


class _Returned:
    """One tensor of an output, and whether it was changed in place since."""

    __slots__ = ("_counter", "_geometry", "_size_bytes", "_storage", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._geometry: Geometry = geometry_of(tensor)
        self._storage = weakref.ref(storage := tensor.untyped_storage())
        self._size_bytes = storage.nbytes()
        self._counter = change_counter(tensor)
        self._version = version_of(tensor)

    def storage_for(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """The storage, if a recomputed tensor may lie in it."""
        storage = self._storage()
        if storage is None or version_of(self._counter) != self._version or not _is_plain(tensor):
            return None
        made = tensor.untyped_storage()
        fits = made.nbytes() == self._size_bytes and geometry_of(tensor) == self._geometry
        return storage if fits and made._cdata != storage._cdata else None


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and has_storage(tensor) and not tensor.is_inference()
