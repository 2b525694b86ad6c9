"""What the ops on a tape read, make and change, without their tensors: prepared by one call, used by those like it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from profiler.recomputation.op_schema import OpTraits
from profiler.recomputation.packed_bits import PackedBits
from profiler.recomputation.saved_tensors import Geometry

_NOT_PLAIN = (Tensor, list, tuple)
Slot = tuple[int, int]  # of a storage that an op makes: the op's ordinal, and which of its results lies there


@dataclass(frozen=True, slots=True)
class ArgumentForm:
    """How an op is called.

    Attributes:
        positional: how many arguments are given by position.
        names: of the others.
        tensor_lists: positions, from the last to the first, and lengths of the lists that hold tensors.
        plain_lists: positions of the others.
    """

    positional: int
    names: tuple[str, ...]
    tensor_lists: tuple[tuple[int, int], ...]
    plain_lists: tuple[int, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentForm:
        """The form of a call."""
        lists = [(k, value) for k, value in enumerate((*args, *kwargs.values())) if isinstance(value, (list, tuple))]
        holding = {k for k, value in lists if any(isinstance(item, Tensor) for item in value)}
        return cls(
            len(args),
            tuple(kwargs),
            tuple((k, len(value)) for k, value in reversed(lists) if k in holding),
            tuple(k for k, _ in lists if k not in holding),
        )

    @property
    def is_plain(self) -> bool:
        """Whether the list is that of the arguments by position, and there are no others."""
        return not self.names and not self.tensor_lists

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The arguments as one list; None where they are of another form, or where tensors may lie deeper."""
        if len(args) != self.positional or (tuple(kwargs) if kwargs else ()) != self.names:
            return None
        values = [*args, *kwargs.values()] if kwargs else list(args)
        for place in self.plain_lists:
            items = values[place]
            if not isinstance(items, (list, tuple)) or any(isinstance(item, _NOT_PLAIN) for item in items):
                return None
        for place, length in self.tensor_lists:
            items = values[place]
            if not isinstance(items, (list, tuple)) or len(items) != length:
                return None
            values[place : place + 1] = items
        return values

    def call(self, values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Such a list as arguments by position and by name."""
        for place, length in reversed(self.tensor_lists):
            values[place : place + length] = [values[place : place + length]]
        return values[: self.positional], dict(zip(self.names, values[self.positional :], strict=True))


class Read(NamedTuple):
    """An argument that lies in a storage which an op on the tape makes."""

    place: int
    slot: Slot
    version: int
    geometry: Geometry


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One op that may run again.

    Its arguments are one list: those by position, then those by name, with the items of lists that hold tensors in
    the place of those lists.

    Attributes:
        ordinal: which op of the call it is.
        op: the overload.
        traits: what its schema says.
        grad_enabled: whether gradients were on around it: some kernels make more then.
        form: how arguments are brought into that list, and back.
        types: of the arguments.
        reads: arguments that ops on the tape make.
        inputs: places of tensors that come from outside.
        shape_only: of the first argument only shape and kind matter.
        makes: which of its results lie in new storages.
        writes: storages that it changes in place, with the version that it makes.
    """

    ordinal: int
    op: Any
    traits: OpTraits
    grad_enabled: bool
    form: ArgumentForm
    types: tuple[type, ...]
    reads: tuple[Read, ...]
    inputs: tuple[int, ...]
    shape_only: bool
    makes: tuple[int, ...] = ()
    writes: tuple[tuple[Slot, int], ...] = ()

    def unpacks_as(self, other: Instruction) -> bool:
        """Whether it is the same as another one of ``unpacking``."""
        return (self.op, self.reads, self.makes, self.writes) == (other.op, other.reads, other.makes, other.writes)


def unpacking(
    ordinal: int, reads: tuple[Read, ...], makes: tuple[int, ...], writes: tuple[tuple[Slot, int], ...]
) -> Instruction:
    """Unpack bits in place of running an op: into what it filled (arguments: that and the bits), or a new tensor."""
    op, types = (_unpack_into, (Tensor, PackedBits)) if writes else (PackedBits.unpacked, (PackedBits,))
    form = ArgumentForm(len(types), (), (), ())
    return Instruction(ordinal, op, OpTraits(), False, form, types, reads, (), False, makes, writes)


def _unpack_into(filled: Tensor, bits: PackedBits) -> Tensor:
    return bits.unpack_into(filled)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One op that runs again, and what becomes of its results.

    Attributes:
        instruction: the op.
        makes: its results in new storages, each with whether it is what tensors are waiting for, and whether an op that
            has not run again reads it.
        writes: storages of which it makes the version that tensors are waiting for.
        drops: storages that nothing reads any more.
    """

    instruction: Instruction
    makes: tuple[tuple[int, Slot, bool, bool], ...]
    writes: tuple[Slot, ...]
    drops: tuple[Slot, ...]


class TapeProgram:
    """In what order the ops of a tape run again, for whatever is wanted and whatever has run before.

    Args:
        instructions: by ordinal.
    """

    def __init__(self, instructions: Mapping[int, Instruction]) -> None:
        self.instructions = instructions
        self._steps: dict[tuple[int, int], tuple[Step, ...]] = {}
        self._writers: dict[Slot, list[int]] = {}
        self._readers: dict[tuple[Slot, int], list[int]] = {}
        self._all_readers: dict[Slot, int] = {}
        for ordinal, instruction in instructions.items():
            for leaf in instruction.makes:
                self._writers[ordinal, leaf] = [ordinal]
            for slot, _ in instruction.writes:
                self._writers[slot].append(ordinal)
            for read in instruction.reads:
                self._readers.setdefault((read.slot, read.version), []).append(ordinal)
                self._all_readers[read.slot] = self._all_readers.get(read.slot, 0) | 1 << ordinal

    def steps_to(self, wanted: int, done: int) -> tuple[Step, ...]:
        """What must run before and including the op ``wanted``, in order.

        Args:
            wanted: the op's ordinal.
            done: the ops that have run again: the sum of 2 to the power of their ordinals.
        """
        steps = self._steps.get((wanted, done))
        if steps is None:
            steps = self._steps[wanted, done] = tuple(self._prepare(wanted, done))
        return steps

    def needed_for(self, wanted: int, done: int) -> list[int]:
        """Ordinals of the ops that must run before and including ``wanted``, in order."""
        needed: set[int] = set()
        waiting = [wanted]
        while waiting:
            ordinal = waiting.pop()
            if done >> ordinal & 1 or ordinal in needed:
                continue
            needed.add(ordinal)
            instruction = self.instructions[ordinal]
            waiting.extend(self._writers[read.slot][read.version] for read in instruction.reads)
            for slot, version in instruction.writes:
                # Whoever reads the version before must do so before it is overwritten.
                waiting.extend(self._readers.get((slot, version - 1), ()))
        return sorted(needed)

    def _prepare(self, wanted: int, done: int) -> list[Step]:
        steps = []
        for ordinal in self.needed_for(wanted, done):
            done |= 1 << ordinal
            instruction = self.instructions[ordinal]
            makes = [(leaf, (ordinal, leaf)) for leaf in instruction.makes]
            steps.append(
                Step(
                    instruction,
                    makes=tuple(
                        (leaf, slot, self._is_last(slot, 0), self._is_read(slot, done)) for leaf, slot in makes
                    ),
                    writes=tuple(slot for slot, version in instruction.writes if self._is_last(slot, version)),
                    drops=tuple({r.slot: None for r in instruction.reads if not self._is_read(r.slot, done)}),
                )
            )
        return steps

    def _is_last(self, slot: Slot, version: int) -> bool:
        return version == len(self._writers[slot]) - 1

    def _is_read(self, slot: Slot, done: int) -> bool:
        """Whether an op that has not run again reads a storage; the one that changes it next reads it too."""
        return bool(self._all_readers.get(slot, 0) & ~done)


@dataclass(slots=True)
class Prepared:
    """What the calls so far have prepared for those that come: each op by itself, and the program of them all.

    Attributes:
        instructions: by ordinal.
        program: of one call.
    """

    instructions: dict[int, Instruction] = field(default_factory=dict)
    program: TapeProgram | None = None

    def program_of(self, instructions: dict[int, Instruction]) -> TapeProgram:
        """The program of these instructions."""
        if self.program is None or self.program.instructions != instructions:
            self.program = TapeProgram(dict(instructions))
        return self.program
