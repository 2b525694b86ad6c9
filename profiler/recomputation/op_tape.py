"""Ops whose results are not kept, recorded in forward with their arguments, and run again when backward needs them.

What runs again are the very kernels with the very arguments that the forward
dispatched, below autograd and autocast: no module code, no hooks, no side
effects. What none of those ops makes is kept: in the graph, or by the op that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from profiler.recomputation.module_rerun import running_again
from profiler.recomputation.op_schema import OpTraits, traits_of
from profiler.recomputation.packed_bits import PackedBits, is_packable
from profiler.recomputation.recomputed_tensors import RecomputedStorage, RecomputedTensor
from profiler.recomputation.rng_state import drawing_from, random_state_of
from profiler.recomputation.saved_tensors import (
    RecordedInput,
    ShapeOnly,
    TensorStandIn,
    below_autograd,
    geometry_of,
    lies_so,
    recorded_inputs_in,
    view_of,
    without_graph,
)
from profiler.recomputation.tape_program import (
    ArgumentForm,
    Instruction,
    Prepared,
    Read,
    Slot,
    Step,
    TapeProgram,
    unpacking,
)
from profiler.workload.torch_flags import flags_now, with_flags

# Is told of each op before it runs again, or its result is packed, by its ordinal; of the end of these by None.
Watch = Callable[["int | None"], None]
Held = tuple[list[Any], Any]  # arguments without what is made again, and the random generator's state


class OpTape:
    """Records ops during forward; runs them again on demand, each at most once, freeing what nothing needs any more.

    Attributes:
        prepared: what calls like this one have prepared; where an op has other arguments, it is prepared anew.
        watch: is told of ops that run again.
    """

    def __init__(self) -> None:
        self.prepared = Prepared()
        self._made: dict[int, RecomputedStorage] = {}  # by the address of the storage
        self._storages: dict[Slot, RecomputedStorage] = {}
        self._instructions: dict[int, Instruction] = {}
        self._held: dict[int, Held] = {}  # of the ops that have not run again
        self._done = 0  # the others, each a bit
        self._program: TapeProgram | None = None
        self._roots: dict[Slot, Tensor] = {}  # over storages that were made again, while ops need them
        self._recording = True
        self._inputs_passed_on = False
        self._flags = flags_now()
        self.watch: Watch | None = None

    # Forward -----------------------------------------------------------------

    def recomputed_storage_of(self, tensor: Tensor) -> RecomputedStorage | None:
        """The storage under ``tensor`` if an op on the tape made it and only such ops changed it since."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        made = self._made.get(storage._cdata)
        return made if made is not None and made.is_under(tensor, storage) else None

    def placeholder_of(self, tensor: Tensor) -> RecomputedTensor | None:
        """What may stand in the graph for ``tensor``; None where it cannot be made again."""
        recomputed = self.recomputed_storage_of(tensor)
        return None if recomputed is None else RecomputedTensor(self.recompute, recomputed, tensor)

    def may_be_unwritten(self, recomputed: RecomputedTensor) -> bool:
        """Whether the op that made a tensor's storage may have left memory in it as it was; for after the call."""
        slot = recomputed.made_as
        return slot is not None and slot[1] in self._instructions[slot[0]].traits.unwritten

    def keep_written(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op that is not recorded is about to change storages in place: from now on they can only be kept."""
        for tensor in traits_of(op).writes(args, kwargs):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                made = self._made.get(storage._cdata)
                if made is not None and made.original() is storage:
                    self._fill(made)
                    del self._made[storage._cdata]

    def end_recording(self) -> None:
        """The call is over."""
        self._recording = False
        self._made.clear()

    def settle_inputs(self) -> None:
        """The call was a second run, and has put back the buffers that it changed."""
        for recorded_input in self.inputs():
            recorded_input.settle()

    def inputs(self) -> Iterator[RecordedInput]:
        """What the recorded ops read from outside."""
        for values, _ in self._held.values():
            yield from recorded_inputs_in(values)

    def pass_inputs_on(self, holder_of: Callable[[Tensor], TensorStandIn]) -> None:
        """Let other stand-ins hold what the recorded ops read from outside; for after the call."""
        for _, recorded_input in self.recorded_inputs():
            recorded_input.pass_on(holder_of)

    def recorded_inputs(self) -> list[tuple[int, RecordedInput]]:
        """What the recorded ops read from outside, each with the op's ordinal, to be passed on."""
        self._inputs_passed_on = True
        return [
            (ordinal, recorded_input)
            for ordinal, (values, _) in self._held.items()
            for recorded_input in recorded_inputs_in(values)
        ]

    def forget_unneeded(self) -> None:
        """Forget the ops that no placeholder needs; for after a call of which not only those were recorded."""
        program = self._program_now()
        wanted = [recomputed.writers[-1] for recomputed in self._storages.values() if recomputed.waiting()]
        needed = {ordinal for writer in wanted for ordinal in program.needed_for(writer, self._done)}
        for ordinal in self._held.keys() - needed:
            del self._held[ordinal]
            self._done |= 1 << ordinal

    def fill_all(self) -> None:
        """Fill every placeholder and take no more: what comes now may change what the recorded ops read."""
        with below_autograd():
            for recomputed in self._storages.values():
                self._fill(recomputed)
        self._made.clear()

    def _fill(self, recomputed: RecomputedStorage) -> None:
        storage = recomputed.original()
        for placeholder in recomputed.waiting():
            if storage is not None:
                placeholder.fill_from_storage(storage)
            else:
                placeholder.tensor()

    def run(self, ordinal: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and record it."""
        instruction = self.prepared.instructions.get(ordinal)
        found = None if instruction is None else self._arguments_by(instruction, args, kwargs)
        if instruction is None or found is None:
            return self._run_unprepared(ordinal, op, args, kwargs)
        random_state = random_state_of(args, kwargs) if instruction.traits.random else None
        result = op(*args, **kwargs)
        for slot, _ in instruction.writes:
            self._storages[slot].writers.append(ordinal)
        held, given = found
        makes = () if instruction.traits.aliases else self._register(ordinal, result, given)
        if makes != instruction.makes:
            instruction = self.prepared.instructions[ordinal] = replace(instruction, makes=makes)
        self._instructions[ordinal] = instruction
        self._held[ordinal] = held, random_state
        return result

    def run_packing(self, ordinal: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op whose result is zeros and ones, and record that it is held as bits.

        Where it cannot be, it is kept as it is.
        """
        written = traits_of(op).writes(args, kwargs)
        changed = [self.recomputed_storage_of(tensor) for tensor in written]
        if any(storage is None for storage in changed) or not all(map(is_packable, written)):
            self.keep_written(op, args, kwargs)
            return op(*args, **kwargs)
        reads = [Read(0, s.slot, s.version, geometry_of(t)) for s, t in zip(changed, written, strict=True) if s]
        result = op(*args, **kwargs)
        if not is_packable(result):
            return result
        if self.watch is not None:
            self.watch(ordinal)
        with below_autograd():
            bits = PackedBits(result)
        if self.watch is not None:
            self.watch(None)
        writes = []
        for storage in changed:
            assert storage is not None
            storage.writers.append(ordinal)
            writes.append((storage.slot, storage.version))
        makes = () if written else self._register(ordinal, result, [])
        instruction = unpacking(ordinal, tuple(reads), makes, tuple(writes))
        known = self.prepared.instructions.get(ordinal)
        if known is not None and known.unpacks_as(instruction):
            instruction = known
        self.prepared.instructions[ordinal] = instruction
        self._instructions[ordinal] = instruction
        self._held[ordinal] = ([None, bits] if reads else [bits]), None
        return result

    def _arguments_by(
        self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[int]] | None:
        """What is held of an op's arguments, and addresses of the storages; None where others were prepared."""
        values = instruction.form.flat(args, kwargs)
        if values is None or tuple(map(type, values)) != instruction.types:
            return None
        if torch.is_grad_enabled() is not instruction.grad_enabled:
            return None
        given = []
        for place, slot, version, geometry in instruction.reads:
            tensor = values[place]
            storage = tensor.untyped_storage()
            key = storage._cdata
            made = self._made.get(key)
            if made is None or made.slot != slot or len(made.writers) != version + 1:
                return None
            if not made.is_under(tensor, storage) or not lies_so(tensor, geometry):
                return None
            values[place] = None
            given.append(key)
        for place in instruction.inputs:
            tensor = values[place]
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                key = storage._cdata
                made = self._made.get(key)
                if made is not None and made.is_under(tensor, storage):
                    return None
                given.append(key)
            values[place] = RecordedInput(without_graph(tensor))
        _set_apart(instruction.traits, values, shape_only=instruction.shape_only)
        return values, given

    def _run_unprepared(self, ordinal: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = traits_of(op)
        written = traits.writes(args, kwargs) if traits.written else []
        form = ArgumentForm.of(args, kwargs)
        values = form.flat(args, kwargs)
        if any(self.recomputed_storage_of(tensor) is None for tensor in written) or values is None:
            self.keep_written(op, args, kwargs)
            return op(*args, **kwargs)  # It changes what is kept, and must not do so twice.
        types = tuple(map(type, values))
        shape_only = traits.shape_only and args[0].layout is torch.strided
        reads, inputs, given = self._encode(values, shape_only=shape_only)
        _set_apart(traits, values, shape_only=shape_only)
        random_state = random_state_of(args, kwargs) if traits.random else None
        grad_enabled = torch.is_grad_enabled()
        result = op(*args, **kwargs)
        writes = []
        for tensor in written:
            changed = self.recomputed_storage_of(tensor)
            if changed is not None:
                changed.writers.append(ordinal)
                writes.append((changed.slot, changed.version))
        makes = () if traits.aliases else self._register(ordinal, result, given)
        self._instructions[ordinal] = self.prepared.instructions[ordinal] = Instruction(
            ordinal, op, traits, grad_enabled, form, types, reads, inputs, shape_only, makes, tuple(writes)
        )
        self._held[ordinal] = values, random_state
        return result

    def _encode(self, values: list[Any], *, shape_only: bool) -> tuple[tuple[Read, ...], tuple[int, ...], list[int]]:
        """Take the tensors out of an op's arguments that are made again, and hold the others.

        Returns:
            What is read of the tape, places of the others, and addresses of all storages.
        """
        reads: list[Read] = []
        inputs: list[int] = []
        given: list[int] = []
        for place, value in enumerate(values):
            if not isinstance(value, Tensor) or (shape_only and place == 0):
                continue
            made = self.recomputed_storage_of(value)
            if made is None:
                inputs.append(place)
                values[place] = RecordedInput(without_graph(value))
            else:
                reads.append(Read(place, made.slot, made.version, geometry_of(value)))
                values[place] = None
            if value.layout is torch.strided:
                given.append(value.untyped_storage()._cdata)
        return tuple(reads), tuple(inputs), given

    def _register(self, ordinal: int, result: Any, given: list[int]) -> tuple[int, ...]:
        """Note the storages that an op made, those under its results that were not under its arguments: which ones."""
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        makes = []
        for leaf, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in given:
                continue
            given.append(key)
            slot = (ordinal, leaf)
            self._made[key] = self._storages[slot] = RecomputedStorage(slot, storage, tensor)
            makes.append(leaf)
        return tuple(makes)

    # Backward ----------------------------------------------------------------

    def recompute(self, recomputed: RecomputedStorage) -> None:
        """Make a storage again, in its last version."""
        wanted = recomputed.writers[-1]
        if self._inputs_passed_on:  # Who holds something may have to run a part of the model for it, gradients and all.
            for step in self._program_now().steps_to(wanted, self._done):
                for recorded_input in recorded_inputs_in(self._held[step.instruction.ordinal][0]):
                    recorded_input.tensor()
        with running_again(), with_flags(self._flags), below_autograd():
            if self._recording and recomputed.original() is not None:
                self._fill(recomputed)
                return
            steps = self._program_now().steps_to(wanted, self._done)
            self._run_again(steps)
        if self._recording:  # A backward inside the call: what it had made is recorded no further.
            known = {slot for step in steps for _, slot, _, _ in step.makes}
            self._made = {key: made for key, made in self._made.items() if made.slot not in known}

    def _program_now(self) -> TapeProgram:
        if self._recording:
            return TapeProgram(self._instructions)
        if self._program is None:
            self._program = self.prepared.program_of(self._instructions)
        return self._program

    def _run_again(self, steps: Sequence[Step]) -> None:
        held, roots, watch = self._held, self._roots, self.watch
        grad_enabled = False
        for step in steps:
            instruction = step.instruction
            ordinal = instruction.ordinal
            if watch is not None:
                watch(ordinal)
            values, random_state = held[ordinal]
            args: list[Any] = values.copy()
            for place, slot, _, geometry in instruction.reads:
                root = roots[slot]
                args[place] = root if lies_so(root, geometry) else view_of(root, geometry)
            for place in instruction.inputs:
                args[place] = args[place].tensor()
            kwargs: dict[str, Any] = {}
            if not instruction.form.is_plain:
                args, kwargs = instruction.form.call(args)
            if instruction.shape_only:
                args[0] = args[0].tensor()
                kwargs["device"] = kwargs.get("device") or values[0].device
            if instruction.traits.statistics and instruction.traits.renews_statistics(tuple(args)):
                for place in instruction.traits.statistics:  # They have been updated once, by the forward.
                    args[place] = _scratch_copy(args[place])
            if grad_enabled is not instruction.grad_enabled:
                grad_enabled = instruction.grad_enabled
                torch._C._set_grad_enabled(grad_enabled)
            if random_state is None:
                result = instruction.op(*args, **kwargs)
            else:
                with drawing_from(random_state):
                    result = instruction.op(*args, **kwargs)
            del held[ordinal], values, args, kwargs  # What nothing needs any more goes before the next op runs.
            self._done |= 1 << ordinal
            for leaf, slot, fills, is_read in step.makes:
                root = result[leaf] if isinstance(result, (tuple, list)) else result
                if fills:
                    self._storages[slot].fill(root)
                if is_read:
                    roots[slot] = root
            for slot in step.writes:
                self._storages[slot].fill(roots[slot])
            for slot in step.drops:
                del roots[slot]
            root = result = None
        if watch is not None:
            watch(None)


def _set_apart(traits: OpTraits, values: list[Any], *, shape_only: bool) -> None:
    """Arguments of which not all values matter."""
    if shape_only:
        values[0] = ShapeOnly(values[0])
    for place in traits.statistics:  # The op itself changes them, and counts no change.
        if isinstance(values[place], RecordedInput):
            values[place].values = ()


def _scratch_copy(statistics: Tensor | None) -> Tensor | None:
    return None if statistics is None else statistics.clone()
