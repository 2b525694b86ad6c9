"""A stage call that keeps nothing for backward, and runs again when backward asks for what it would have saved."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.plans.lowering import Rerun
from planner.plans.plan import PlannedStage
from planner.runtime.kept_runs import KeptRuns
from planner.runtime.plan_checks import warn_of_a_retained_graph, warn_once
from planner.runtime.shared_outputs import SharedOutputs
from planner.runtime.stage_input import StageInput, StageOutput
from planner.runtime.transfers import OffloadedStorage
from profiler.capture.call_program import BoundProgram, CallProgram
from profiler.capture.read_again import CHANGED
from profiler.recomputation.module_rerun import (
    CallState,
    copies_of_parameters,
    rerun_dropping,
    rerun_until_saved,
    with_other_history,
)
from profiler.recomputation.outer_hooks import SavedParameters
from profiler.recomputation.saved_tensors import (
    RerunError,
    SavedSignature,
    SignatureCheck,
    TensorStandIn,
    Values,
    is_parameter_like,
    is_undefined,
    signature_of,
    some_values_of,
    undefined_memory_shown,
    unpack,
)
from profiler.tensors.tensor_parts import storage_key
from profiler.tensors.tensor_trees import device_of, in_new_containers, tensors_in
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

_INPUT_CHANGED = (
    "its input was changed in place after the stage before had returned it, as it was not when profiled; it is held, "
    "and the peak is not promised"
)


class _HandedOver(NamedTuple):
    """What the forward of a program has handed over to backward."""

    program: CallProgram
    tensors: list[Any]


class SavedPlaceholder:
    """Stands in the graph for a tensor that a dropped stage would have saved; holds it once it has been made again.

    The autograd node owns it, so what it holds is let go exactly when
    autograd lets go of a saved tensor: after the node ran, or with the graph.
    """

    __slots__ = ("__weakref__", "stage", "value")

    def __init__(self, stage: DroppedStage) -> None:
        self.stage = stage
        self.value: Tensor | TensorStandIn | _HandedOver | None = None

    def tensor(self) -> Tensor:
        """The tensor, which the stage makes again where it has not yet."""
        if self.value is None:
            self.stage.materialise()
        assert self.value is not None and not isinstance(self.value, _HandedOver)
        return unpack(self.value)

    def taken(self, *, again: bool) -> tuple[CallProgram, list[Any]]:
        """Of a stage that runs as a program, the program and what its forward handed over; as ``Saved`` says."""
        if self.value is None:
            self.stage.materialise()
        assert isinstance(self.value, _HandedOver)
        program, tensors = self.value
        if again:
            return program, list(tensors)
        self.value = None
        return program, tensors


class _RerunOutput(NamedTuple):
    """What the latest rerun of a stage returned; emptied once the next stage has taken its input from it."""

    position: int
    tensors: list[Tensor]


class DroppedStage:
    """One call of a dropped stage: its input, its surroundings, and the placeholders of what it saved.

    The placeholders own it, and it owns the call before as long as that may have to make its input.

    Args:
        position: of the stage in the plan.
        module, forward: that are called.
        runs: of the step.
        others: the dropped stages of the step by position, as far as the graph needs them.
        stage: what is known of it, where the plan has none at that position.
        program: that it runs as; None for the module's own forward.
    """

    def __init__(
        self,
        position: int,
        module: nn.Module,
        forward: Callable[..., Any],
        runs: KeptRuns,
        others: weakref.WeakValueDictionary[int, DroppedStage],
        stage: PlannedStage | None = None,
        program: BoundProgram | None = None,
    ) -> None:
        self.position = position
        self._program = program
        self.stage = stage or runs.plan.stages[position]
        self.done = False
        self.expects_links = True
        # The boundaries, by the stages behind them, that its input stands for: its own, and those of stages that were
        # left out before it.
        self._boundaries = range(position, position + 1)
        self._held_boundaries: set[int] = set()
        self._module = module
        self._forward = forward
        self._runs = runs
        self._others = others
        self._input: StageInput
        self._previous: DroppedStage | None = None
        self._state: CallState | None = None
        self._returned: SharedOutputs | None = None
        self._set_parameters: list[Tensor] = []  # by its first run, and what they held before is not known
        self._signatures: list[SavedSignature | None] = []
        self._held_values: list[Values] = []  # of a program's parameters and buffers, some
        self._returns_others = False  # what a second run returns is not what the first one did
        self._placeholders: list[Callable[[], SavedPlaceholder | None]] = []

    # Forward -----------------------------------------------------------------

    def take_input(self, arguments: Any, previous: DroppedStage | None, output: StageOutput | None) -> None:
        """Hold the arguments, but for linked tensors that the plan drops.

        Args:
            arguments: of the first run.
            previous: the last dropped stage before; those between are left out in this step, or kept.
            output: of it.
        """
        lowered, inputs = self._runs.lowered, tensors_in(arguments)
        expected = {i for i, _ in self.stage.links}
        links, changed = ({}, False) if output is None else output.links_to(inputs, expected)
        if links and previous is not None:
            self._previous = previous
            self._boundaries = range(previous.position + 1, self.position + 1)
        self._held_boundaries = set(lowered.holding_input.intersection(self._boundaries))
        hold_linked = bool(self._held_boundaries) or self.position not in lowered.dropped
        if changed and not hold_linked:
            warn_once(self.stage.name, _INPUT_CHANGED)
        elif self.expects_links and not hold_linked and links.keys() != expected:
            warn_once(self.stage.name, "its input is not the output of the stage before, as it was when profiled")
        self._runs.check_shapes(self.stage, inputs)
        self._input = StageInput(self.stage.name, arguments, inputs, links, hold_linked)

    def run_first(self, args: Any, kwargs: Any) -> Any:
        """The first forward: autograd gets placeholders in place of what it saves."""
        # Whether it draws is not asked of the profile: a dropout's rate may have been changed since.
        device, changing = device_of((args, kwargs)), self.stage.mutated_buffers
        checked = self._runs.deviations.turns.checked(self.position)
        if (program := self._program) is not None:
            draws, held = program.program.draws, program.held()
            self._held_values = [*map(some_values_of, held)] if checked else []
            self._state = CallState(self._module, device, draws_random=draws, changing=changing, inputs=held)
            return self._run_first_as_program(program, args, kwargs)
        self._state = CallState(self._module, device, draws_random=True, changing=changing)
        undefined = self._runs.deviations.undefined.get(self.position, ())
        state_storages = self._state.state_storages() if checked else set()
        copies = {} if self.position in self._runs.deviations.dropped_stages else copies_of_parameters(self._module)
        self._runs.deviations.dropped_stages.add(self.position)
        saved_storages: set[int] | None = set() if self._input.holds_of(self._runs.batch) else None
        parameters, placeholders, signatures = SavedParameters(), self._placeholders, self._signatures

        def pack(tensor: Tensor) -> TensorStandIn:
            if saved_storages is not None:
                saved_storages.add(storage_key(tensor))
            if is_parameter_like(tensor):
                placeholders.append(_gone)  # A parameter: there anyway. Its place in the order still counts.
                if checked:
                    signatures.append(None)
                return parameters.stand_in(tensor)
            if checked:
                # What a buffer holds, the run itself may change.
                values = len(placeholders) not in undefined and storage_key(tensor) not in state_storages
                signatures.append(signature_of(tensor, values=values))
            placeholder = SavedPlaceholder(self)
            placeholders.append(weakref.ref(placeholder))
            return placeholder

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = self._forward(*args, **kwargs)
        parameters.pass_on()
        if self.position in self._runs.shared:
            self._returned = SharedOutputs(tensors_in(output))
        self._set_parameters = self._state.first_run_over(copies)
        if saved_storages is not None:
            self._input.copy_batch(self._runs.batch, saved_storages)
        return output

    def _run_first_as_program(self, program: BoundProgram, args: Any, kwargs: Any) -> Any:
        """The same of a stage that runs as a program."""
        placeholder = SavedPlaceholder(self)
        self._placeholders.append(weakref.ref(placeholder))
        output = program.dropping(placeholder, args, kwargs)
        if self.position in self._runs.shared:
            self._returned = SharedOutputs(tensors_in(output))
        if self._input.holds_of(self._runs.batch):
            inputs = tensors_in((args, kwargs))
            saved = {storage_key(inputs[number]) for number in program.program.arguments_in_backward}
            self._input.copy_batch(self._runs.batch, saved)
        return output

    # Backward ----------------------------------------------------------------

    @property
    def needed(self) -> bool:
        """Whether backward will ask for anything that is not there yet."""
        return not self.done and any(reference() is not None for reference in self._placeholders)

    def materialise(self) -> None:
        """Make again what this stage saved, and whatever the plan makes along with it."""
        warn_of_a_retained_graph()
        self._runs.batch.backward_begun = True
        output: _RerunOutput | None = None
        for position in self._runs.backward_reaches(self.position):
            stage = self._others.get(position)
            if position == self.position or stage is None or not stage.needed:
                output = self._carry_out_before(position, output)
        if not self.done:
            # Backward came here in an order the plan does not know (a part of the graph): do what is needed.
            self._rerun(Rerun(self.position, "until_saved", False), None)
        for position in self._runs.lowered.input_releases.get(self.position, ()):
            self._release_input_of(position)

    def _carry_out_before(self, position: int, output: _RerunOutput | None) -> _RerunOutput | None:
        """What the plan runs again before the backward of a stage, also where this step left that stage out."""
        lowered, transfers = self._runs.lowered, self._runs.transfers
        for number, rerun in enumerate(lowered.reruns.get(position, ())):
            if transfers is not None:
                transfers.backward_begins(position, number)
            stage = self._standing_for(rerun.stage)
            if stage is None or stage.done:
                continue
            if rerun.hold:
                stage._held_boundaries.add(rerun.stage)
            if stage.position == rerun.stage:
                output = stage._rerun(rerun, output)
        if transfers is not None:
            transfers.backward_begins(position)
        if position != self.position:
            for released in lowered.input_releases.get(position, ()):
                self._release_input_of(released)
        return output

    def _release_input_of(self, position: int) -> None:
        """The plan lets the boundary before a stage go."""
        stage = self._standing_for(position)
        if stage is not None and not stage.done and stage._previous is not None:
            stage._held_boundaries.discard(position)
            if not stage._held_boundaries:
                stage._input.release_linked()

    def _standing_for(self, position: int) -> DroppedStage | None:
        """The stage, or the next one where this step left it out: the input of both is the same."""
        for following in range(position, len(self._runs.plan.stages)):
            stage = self._others.get(following)
            if stage is not None:
                return stage if position in stage._boundaries else None
        return None

    def offload_inputs(self, numbers: Sequence[int]) -> list[OffloadedStorage]:
        """The storages under input tensors that are held, by their numbers."""
        return [] if self.done else self._input.offload(numbers)

    def _rerun(self, rerun: Rerun, before: _RerunOutput | None) -> _RerunOutput | None:
        """Run again, on the output of the rerun before where the input is not held."""
        inputs = self._inputs(before)
        if before is not None:
            before.tensors.clear()  # What else the stage before returned goes now, as it does in a first forward.
        args, kwargs = self._input.arguments(inputs)
        with self._naming_the_stage():
            saved, output = self._run_again(rerun, args, kwargs)
        if rerun.mode == "drop" and self._held_boundaries:
            self._input.hold(inputs)
        if saved is not None:
            self._fill(saved)
        return None if rerun.mode == "until_saved" else _RerunOutput(self.position, tensors_in(output))

    def _run_again(
        self, rerun: Rerun, args: Any, kwargs: Any
    ) -> tuple[Sequence[Tensor | TensorStandIn | _HandedOver] | None, Any]:
        """What a second run saves (None where nothing is to be kept) and returns.

        Raises:
            RerunError: it is not what the first run saved.
        """
        assert self._state is not None
        if self._program is not None:
            return self._run_program_again(self._program, rerun, args, kwargs)
        if self._set_parameters:
            raise self._sets_parameters()
        state, given, named = self._state, in_new_containers(args), in_new_containers(kwargs)
        if rerun.mode == "drop":
            output = rerun_dropping(self._forward, state, given, named)
            if self._returned is not None:
                self._returned.take_the_place_of(outputs := tensors_in(output), outputs)
            return None, output
        check = SignatureCheck(self._signatures, self._runs.deviations.undefined.get(self.position, ()))
        references = iter(self._placeholders)

        def needed(_: Tensor) -> bool:
            return next(references, _gone)() is not None  # What the loss does not depend on has gone from the graph.

        def checked(tensor: Tensor) -> bool:
            check.saw(tensor)
            return needed(tensor)

        saw = checked if self._signatures else needed
        if rerun.mode == "until_saved":
            saved = rerun_until_saved(self._forward, state, given, named, len(self._placeholders), saw)
            output = None
        else:
            call = self._forward, state, given, named
            saved, output = self._runs.rerun(self.position, *call, saw, self._returned)
        if not check.difference and len(saved) != len(self._placeholders):
            check.difference = f"{len(saved)} tensors, not {len(self._placeholders)}"
        if check.difference:
            raise self._not_the_same(check.difference)
        if check.other_values:
            del saved, output  # The run that looks into it must not need more memory than the plan has.
            self._note_undefined(check.other_values, args, kwargs)
            return self._run_again(rerun, args, kwargs)
        return saved, output

    def _run_program_again(
        self, program: BoundProgram, rerun: Rerun, args: Any, kwargs: Any
    ) -> tuple[Sequence[_HandedOver] | None, list[Tensor]]:
        """The same of a stage that runs as a program."""
        assert self._state is not None
        with self._state.reinstated():
            saved = None
            if self._held_values:
                self._check_held(program)
            if rerun.mode == "drop":
                outputs, held = program.outputs(args, kwargs), []
            else:
                held, outputs = program.handed_over(args, kwargs)
                saved = [_HandedOver(program.program, held)]
        if self._returned is not None:
            self._returned.take_the_place_of(outputs, [*outputs, *(t for t in held if isinstance(t, Tensor))])
        differentiable = program.program.differentiable
        return saved, [with_other_history(t) if takes else t for t, takes in zip(outputs, differentiable, strict=True)]

    def _check_held(self, program: BoundProgram) -> None:
        """Hold parameters and buffers against some of their values before the first run.

        Raises:
            RerunError: what the program hands over depends on one that was changed since.
        """
        now = map(some_values_of, program.held())
        changed = [k for k, (one, other) in enumerate(zip(now, self._held_values, strict=True)) if one != other]
        if any(k in program.program.held_by_backward for k in changed):
            raise RerunError(CHANGED.format("a parameter"))
        self._returns_others = bool(changed)

    def _note_undefined(self, second: Mapping[int, Values], args: Any, kwargs: Any) -> None:
        """Run once more to see whether other values of saved tensors are no more than memory that nothing filled.

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
        self._runs.deviations.undefined.setdefault(self.position, set()).update(undefined)

    def _not_the_same(self, difference: str) -> RerunError:
        return RerunError(
            f"expected its second run to save what the first one saved, got {difference}; it depends on something that "
            "changed in between and is not kept by its modules (a global, weights written through .data, a generator "
            f"outside of torch). Change that after backward, or keep this stage: a rule with modules = "
            f'{self.stage.name!r} and action = "keep"'
        )

    def _sets_parameters(self) -> RerunError:
        first = self._set_parameters[0]
        name = next((name for name, parameter in self._module.named_parameters() if parameter is first), "")
        return RerunError(
            f"expected parameters to be as they were before it, got a stage that sets {name!r}, a parameter of shape "
            f"{tuple(first.shape)}, in its forward; run one forward before planner.profile and apply, or keep this "
            f'stage: a rule with modules = {self.stage.name!r} and action = "keep"'
        )

    def _inputs(self, before: _RerunOutput | None) -> list[Tensor]:
        """Every input tensor: held, or from the stage before, which is run again where need be."""
        held = self._input.held()
        if any(tensor is None for tensor in held):
            assert self._previous is not None
            if before is None or before.position != self._previous.position:
                before = self._previous._rerun(Rerun(self._previous.position, "drop", False), None)
        with self._naming_the_stage():
            held = self._input.unchanged(held)
            if self._previous is not None and self._previous._returns_others and any(t is None for t in held):
                raise RerunError(CHANGED.format("a parameter of the stage before"))
        links, made = self._input.links, [] if before is None else before.tensors
        return [made[links[i]] if tensor is None else tensor for i, tensor in enumerate(held)]

    @contextmanager
    def _naming_the_stage(self) -> Iterator[None]:
        try:
            yield
        except RerunError as error:
            raise RerunError(f"stage {self.stage.name!r}: {error}") from error

    def _fill(self, saved: Sequence[Tensor | TensorStandIn | _HandedOver]) -> None:
        """Put what was made again into the graph; nothing else of the call is needed then."""
        for reference, tensor in zip(self._placeholders, saved, strict=True):
            placeholder = reference()
            if placeholder is not None:
                placeholder.value = tensor
        self.done = True
        self._input.release()
        self._state = None
        self._signatures = []
        self._previous = None


def _gone() -> None:
    """Stands for the weak reference to a placeholder that never was."""
