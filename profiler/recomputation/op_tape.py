"""Ops whose results are not kept, recorded in forward with their arguments, and run again when backward needs them.

What runs again are the very kernels with the very arguments that the forward
dispatched, below autograd and autocast: no module code, no hooks, no side
effects. What none of those ops makes is kept: in the graph, or by the op that reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from profiler.recomputation.module_rerun import running_again
from profiler.recomputation.op_schema import OpTraits, traits_of
from profiler.recomputation.rng_state import drawing_from, random_state_of
from profiler.recomputation.saved_tensors import (
    RecordedInput,
    ShapeOnly,
    TensorStandIn,
    below_autograd,
    geometry_of,
    recorded_inputs_in,
    tensor_over,
    version_of,
    view_of,
    without_graph,
)
from profiler.workload.torch_flags import flags_now, with_flags


@dataclass(slots=True, eq=False)
class RecomputedStorage:
    """A storage that an op on the tape makes: gone after forward, made again in backward.

    Ops are known by their ordinals and placeholders by weak references: no cycle keeps a step's memory alive.

    Attributes:
        original: the storage that the forward made.
        first_version: torch's own count of changes in place when it was new.
        writers, readers: ordinals of the ops, for each version.
        version: how often ops on the tape have changed it since.
        placeholders: what stands in the graph for tensors over its last version: as for any saved tensor, what is
            written to the storage later counts.
        pending_reads: how many ops that read it have not run again yet.
        tensor: one over the storage that was made again, while such ops need it.
    """

    original: weakref.ref[Any]
    first_version: int
    writers: list[int]
    version: int = 0
    readers: list[list[int]] = field(default_factory=lambda: [[]])
    placeholders: list[weakref.ref[RecomputedTensor]] = field(default_factory=list)
    pending_reads: int = 0
    tensor: Tensor | None = None

    def note_write(self, writer: int) -> None:
        """An op on the tape changes it in place."""
        self.version += 1
        self.writers.append(writer)
        self.readers.append([])

    def waiting(self) -> list[RecomputedTensor]:
        """The placeholders that are still there, and still without their tensor."""
        placeholders = (reference() for reference in self.placeholders)
        return [placeholder for placeholder in placeholders if placeholder is not None and placeholder.waits()]

    def store(self, version: int, tensor: Tensor) -> None:
        """A version of it has been made again, under ``tensor``."""
        if version == self.version:
            for placeholder in self.waiting():
                placeholder.fill(tensor)
        # The writer that changes it next is a reader of it too.
        self.tensor = tensor if self.pending_reads else None

    def note_read(self) -> None:
        """An op that reads it has run again."""
        self.pending_reads -= 1
        if self.pending_reads == 0:
            self.tensor = None


class RecomputedTensor:
    """Stands in the graph for a saved tensor that is made again when backward asks for it; then holds it.

    The autograd node owns it, so what it holds goes exactly when autograd lets go of a saved tensor.
    """

    __slots__ = ("__weakref__", "_geometry", "_recomputed", "_tape", "_value")

    def __init__(self, tape: OpTape, recomputed: RecomputedStorage, tensor: Tensor) -> None:
        self._tape: OpTape | None = tape
        self._recomputed = recomputed
        self._geometry = geometry_of(tensor)
        self._value: Tensor | None = None
        recomputed.placeholders.append(weakref.ref(self))

    @property
    def writers(self) -> list[int]:
        """Ordinals of the ops that make its storage."""
        return self._recomputed.writers

    def waits(self) -> bool:
        """Whether it is still without its tensor."""
        return self._value is None

    def tensor(self) -> Tensor:
        """The saved tensor; runs what is needed for it."""
        if self._value is None:
            assert self._tape is not None
            self._tape.recompute(self._recomputed)
        assert self._value is not None
        return self._value

    def fill(self, tensor: Tensor) -> None:
        """Take the tensor from the storage made again."""
        self._value = view_of(tensor, self._geometry)
        self._tape = None

    def fill_from_storage(self, storage: Any) -> None:
        """Take the tensor from the storage itself, which is still alive."""
        self._value = tensor_over(storage, self._geometry)
        self._tape = None


class _RecomputedView:
    """Stands in an op's recorded arguments for a view of a storage that is made again."""

    __slots__ = ("_geometry", "_recomputed")

    def __init__(self, recomputed: RecomputedStorage, tensor: Tensor) -> None:
        self._recomputed = recomputed
        self._geometry = geometry_of(tensor)

    def tensor(self) -> Tensor:
        """The view; its storage has been made by now."""
        assert self._recomputed.tensor is not None
        return view_of(self._recomputed.tensor, self._geometry)


_STAND_INS = frozenset({_RecomputedView, RecordedInput, ShapeOnly})
# Most arguments that are no tensors are of these kinds: nothing in them is to be looked for.
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout})
_NO_CONTEXT = nullcontext()
Watch = Callable[["int | None"], None]  # is told of each op before it runs again, by its ordinal; of the end by None


@dataclass(slots=True, eq=False)
class RecordedOp:
    """One op that may run again, with its arguments."""

    ordinal: int
    op: Any
    traits: OpTraits
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    reads: list[tuple[RecomputedStorage, int]] = field(default_factory=list)
    allocates: list[tuple[int, RecomputedStorage]] = field(default_factory=list)
    writes: list[tuple[RecomputedStorage, int]] = field(default_factory=list)
    random_state: Any = None
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)  # Some kernels make more where it is.
    done: bool = False


class OpTape:
    """Records ops during forward; runs them again on demand, each at most once, freeing what nothing needs any more."""

    def __init__(self) -> None:
        self._made: dict[int, RecomputedStorage] = {}  # by the address of the storage
        self._records: dict[int, RecordedOp] = {}
        self._recording = True
        self._inputs_passed_on = False
        self._flags = flags_now()
        self.watch: Watch | None = None

    # Forward -----------------------------------------------------------------

    def recomputed_storage_of(self, tensor: Tensor) -> RecomputedStorage | None:
        """The storage under ``tensor`` if an op on the tape made it and only such ops changed it since."""
        made = self._made_storage_of(tensor)
        # Fewer changes are no sign of others: pieces of ``unsafe_split`` count their own alone, ``_foreach`` ops none.
        return made if made is not None and version_of(tensor) <= made.first_version + made.version else None

    def _made_storage_of(self, tensor: Tensor) -> RecomputedStorage | None:
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        made = self._made.get(storage._cdata)
        # An address may be used again after its storage is gone.
        return made if made is not None and made.original() is storage else None

    def keep_written(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op that is not recorded is about to change storages in place: from now on they can only be kept."""
        for tensor in traits_of(op).writes(args, kwargs):
            made = self._made_storage_of(tensor)
            if made is not None:
                self._fill(made)
                del self._made[tensor.untyped_storage()._cdata]

    def end_recording(self) -> None:
        """The call is over."""
        self._recording = False
        self._made.clear()

    def settle_inputs(self) -> None:
        """The call was a second run, and has put back the buffers that it changed."""
        for record in self._records.values():
            for recorded_input in recorded_inputs_in((record.args, record.kwargs)):
                recorded_input.settle()

    def pass_inputs_on(self, holder_of: Callable[[Tensor], TensorStandIn]) -> None:
        """Let other stand-ins hold what the recorded ops read from outside; for after the call."""
        for _, recorded_input in self.recorded_inputs():
            recorded_input.pass_on(holder_of)

    def recorded_inputs(self) -> list[tuple[int, RecordedInput]]:
        """What the recorded ops read from outside, each with the op's ordinal, to be passed on."""
        self._inputs_passed_on = True
        return [
            (record.ordinal, recorded_input)
            for record in self._records.values()
            for recorded_input in recorded_inputs_in((record.args, record.kwargs))
        ]

    def forget_unneeded(self) -> None:
        """Forget the ops that no placeholder needs; for after a call of which not only those were recorded."""
        wanted = [recomputed.writers[-1] for recomputed in self._allocated() if recomputed.waiting()]
        needed = {record.ordinal for writer in wanted for record in self._ops_needed_for(writer)}
        for ordinal in self._records.keys() - needed:
            for recomputed, _ in self._records.pop(ordinal).reads:
                recomputed.pending_reads -= 1

    def fill_all(self) -> None:
        """Fill every placeholder and take no more: what comes now may change what the recorded ops read."""
        with below_autograd():
            for recomputed in self._allocated():
                self._fill(recomputed)
        self._made.clear()

    def _allocated(self) -> list[RecomputedStorage]:
        return [recomputed for record in self._records.values() for _, recomputed in record.allocates]

    def _fill(self, recomputed: RecomputedStorage) -> None:
        storage = recomputed.original()
        for placeholder in recomputed.waiting():
            if storage is not None:
                placeholder.fill_from_storage(storage)
            else:
                placeholder.tensor()

    def run(self, ordinal: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and record it."""
        traits = traits_of(op)
        written = traits.writes(args, kwargs) if traits.written else ()
        if any(self.recomputed_storage_of(tensor) is None for tensor in written):
            self.keep_written(op, args, kwargs)
            return op(*args, **kwargs)  # It changes what is kept, and must not do so twice.
        record = RecordedOp(ordinal, op, traits)
        given: set[int] = set()
        record.args = self._encoded(args, record, given)
        if kwargs:
            record.kwargs = {name: self._encode(value, record, given) for name, value in kwargs.items()}
        if traits.random:
            record.random_state = random_state_of(args, kwargs)
        result = op(*args, **kwargs)
        for tensor in written:
            changed = self.recomputed_storage_of(tensor)
            if changed is not None:
                changed.note_write(ordinal)
                record.writes.append((changed, changed.version))
        if not traits.aliases:
            self._register(result, record, given)
        for recomputed, version in record.reads:
            recomputed.readers[version].append(ordinal)
            recomputed.pending_reads += 1
        self._records[ordinal] = record
        return result

    def _register(self, result: Any, record: RecordedOp, given: set[int]) -> None:
        """Note the storages that an op made: those under its results that were not under its arguments."""
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for leaf, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in given:
                continue
            given.add(key)
            recomputed = self._made[key] = RecomputedStorage(weakref.ref(storage), version_of(tensor), [record.ordinal])
            record.allocates.append((leaf, recomputed))

    def _encoded(self, args: tuple[Any, ...], record: RecordedOp, given: set[int]) -> list[Any]:
        if record.traits.shape_only and args[0].layout is torch.strided:
            return [ShapeOnly(args[0]), *(self._encode(value, record, given) for value in args[1:])]
        encoded = [value if type(value) in _PLAIN else self._encode(value, record, given) for value in args]
        if record.traits.statistics:
            for place in record.traits.statistics:  # The op itself changes them, and counts no change.
                if isinstance(encoded[place], RecordedInput):
                    encoded[place].values = ()
        return encoded

    def _encode(self, value: Any, record: RecordedOp, given: set[int]) -> Any:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return RecordedInput(without_graph(value))
            storage = value.untyped_storage()
            key = storage._cdata
            given.add(key)
            made = self._made.get(key)
            if made is None or made.original() is not storage or version_of(value) > made.first_version + made.version:
                return RecordedInput(without_graph(value))
            record.reads.append((made, made.version))
            return _RecomputedView(made, value)
        if isinstance(value, (list, tuple)):
            return [self._encode(item, record, given) for item in value]
        return value

    # Backward ----------------------------------------------------------------

    def recompute(self, recomputed: RecomputedStorage) -> None:
        """Make a storage again, in its last version."""
        if self._inputs_passed_on:  # Who holds something may have to run a part of the model for it, gradients and all.
            for record in self._ops_needed_for(recomputed.writers[-1]):
                for recorded_input in recorded_inputs_in((record.args, record.kwargs)):
                    recorded_input.tensor()
        with running_again(), with_flags(self._flags), below_autograd():
            if self._recording and recomputed.original() is not None:
                self._fill(recomputed)
                return
            needed = self._ops_needed_for(recomputed.writers[-1])
            for record in needed:
                if self.watch is not None:
                    self.watch(record.ordinal)
                _run_again(record)
            if self.watch is not None:
                self.watch(None)
        if self._recording:  # A backward inside the call: what it had made is recorded no further.
            known = {id(made) for record in needed for _, made in record.allocates}
            self._made = {key: made for key, made in self._made.items() if id(made) not in known}

    def _ops_needed_for(self, wanted: int) -> list[RecordedOp]:
        """The ops that must run before and including ``wanted``, in order."""
        needed: dict[int, RecordedOp] = {}
        waiting = [wanted]
        while waiting:
            ordinal = waiting.pop()
            record = self._records[ordinal]
            if record.done or ordinal in needed:
                continue
            needed[ordinal] = record
            waiting.extend(recomputed.writers[version] for recomputed, version in record.reads)
            for recomputed, version in record.writes:
                # Whoever reads the version before must do so before it is overwritten.
                waiting.extend(recomputed.readers[version - 1])
        return [needed[ordinal] for ordinal in sorted(needed)]


def _run_again(record: RecordedOp) -> None:
    traits = record.traits
    args = [value if type(value) in _PLAIN else _decoded(value) for value in record.args]
    if traits.statistics and traits.renews_statistics(tuple(args)):
        for place in traits.statistics:  # They have been updated once, by the forward.
            args[place] = _scratch_copy(args[place])
    kwargs = {name: _decoded(value) for name, value in record.kwargs.items()} if record.kwargs else record.kwargs
    if traits.shape_only and isinstance(record.args[0], ShapeOnly):
        kwargs["device"] = kwargs.get("device") or record.args[0].device
    torch._C._set_grad_enabled(record.grad_enabled)
    with _NO_CONTEXT if record.random_state is None else drawing_from(record.random_state):
        result = record.op(*args, **kwargs)
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    record.done = True
    record.args, record.kwargs = (), {}
    for leaf, recomputed in record.allocates:
        recomputed.store(0, outputs[leaf])
    for recomputed, version in record.writes:
        assert recomputed.tensor is not None
        recomputed.store(version, recomputed.tensor)
    for recomputed, _ in record.reads:
        recomputed.note_read()


def _scratch_copy(statistics: Tensor | None) -> Tensor | None:
    return None if statistics is None else statistics.clone()


def _decoded(value: Any) -> Any:
    kind = type(value)
    if kind in _STAND_INS:
        return value.tensor()
    if kind is list:
        return [_decoded(item) for item in value]
    return value
