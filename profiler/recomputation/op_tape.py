"""The tape of one stage call: the ops whose results are not kept, recorded so that backward can run them again.

What runs again are the very kernels with the very arguments that the forward
dispatched, below autograd and autocast: no module code, no hooks, no side
effects. Whatever is not made by one of those ops is either kept or held by the
op that reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from profiler.recomputation.module_rerun import running_again
from profiler.recomputation.op_schema import OpTraits, traits_of
from profiler.recomputation.rng_state import drawing_as, drawing_state
from profiler.recomputation.saved_tensors import (
    RecordedInput,
    TensorStandIn,
    geometry_of,
    recorded_inputs_in,
    tensor_over,
    version_of,
    view_of,
    without_graph,
)


class RecomputedStorage:
    """A storage that an op on the tape makes: gone after forward, made again in backward."""

    __slots__ = ("base", "live", "pending", "readers", "root", "version", "waiting", "writers")

    def __init__(self, live: weakref.ref[Any], base: int, writer: int) -> None:
        self.live = live
        # Torch's own count of changes in place when the storage was new; ``version`` counts those on the tape.
        self.base = base
        self.version = 0
        # Ops by their ordinals and placeholders by weak references: no cycle keeps a step's memory alive.
        self.writers = [writer]
        self.readers: list[list[int]] = [[]]
        # For its last version: as for any saved tensor, what is written to the storage later counts.
        self.waiting: list[weakref.ref[RecomputedTensor]] = []
        self.pending = 0
        self.root: Tensor | None = None

    def written(self, writer: int) -> None:
        """An op on the tape changes it in place."""
        self.version += 1
        self.writers.append(writer)
        self.readers.append([])

    def unfilled(self) -> list[RecomputedTensor]:
        """The placeholders that wait for it."""
        return [lazy for reference in self.waiting if (lazy := reference()) is not None and lazy.waits()]


class RecomputedTensor:
    """Stands in the graph for a saved tensor that is made again when backward asks for it; then holds it.

    The autograd node owns it, so what it holds goes exactly when autograd lets go of a saved tensor.
    """

    __slots__ = ("__weakref__", "_geometry", "_remade", "_tape", "_value")

    def __init__(self, tape: OpTape, remade: RecomputedStorage, tensor: Tensor) -> None:
        self._tape: OpTape | None = tape
        self._remade = remade
        self._geometry = geometry_of(tensor)
        self._value: Tensor | None = None
        remade.waiting.append(weakref.ref(self))

    @property
    def writers(self) -> list[int]:
        """Ordinals of the ops that make its storage."""
        return self._remade.writers

    def waits(self) -> bool:
        """Whether it is still without its tensor."""
        return self._value is None

    def tensor(self) -> Tensor:
        """The saved tensor; runs what is needed for it."""
        if self._value is None:
            assert self._tape is not None
            self._tape.make(self._remade)
        assert self._value is not None
        return self._value

    def fill(self, root: Tensor) -> None:
        """Take the tensor from the storage made again."""
        self._value = view_of(root, self._geometry)
        self._tape = None

    def fill_from(self, storage: Any) -> None:
        """Take the tensor from the storage itself, which is still alive."""
        self._value = tensor_over(storage, self._geometry)
        self._tape = None


class _RecomputedView:
    """Stands in an op's recorded arguments for a view of a storage that is made again."""

    __slots__ = ("_geometry", "_remade")

    def __init__(self, remade: RecomputedStorage, tensor: Tensor) -> None:
        self._remade = remade
        self._geometry = geometry_of(tensor)

    def tensor(self) -> Tensor:
        """The view; its storage has been made by now."""
        assert self._remade.root is not None
        return view_of(self._remade.root, self._geometry)


class _ShapeOnly:
    """Stands in an op's recorded arguments for a tensor of which only shape and kind matter."""

    __slots__ = ("_dtype", "_size", "_stride", "device")

    def __init__(self, tensor: Tensor) -> None:
        self._size, self._stride = tensor.size(), tensor.stride()
        self._dtype, self.device = tensor.dtype, tensor.device

    def tensor(self) -> Tensor:
        """One without contents, on no device."""
        return torch.empty_strided(self._size, self._stride, dtype=self._dtype, device="meta")


_STAND_INS = (_RecomputedView, RecordedInput, _ShapeOnly)


class RecordedOp:
    """One op that may run again, with its arguments."""

    __slots__ = ("allocates", "args", "done", "grad", "kwargs", "op", "ordinal", "random", "reads", "traits", "writes")

    def __init__(self, ordinal: int, op: Any, traits: OpTraits) -> None:
        self.ordinal = ordinal
        self.op = op
        self.traits = traits
        self.args: Any = ()
        self.kwargs: Any = {}
        self.reads: list[tuple[RecomputedStorage, int]] = []
        self.allocates: list[tuple[int, RecomputedStorage]] = []
        self.writes: list[tuple[RecomputedStorage, int]] = []
        self.random: Any = None
        self.grad = torch.is_grad_enabled()  # Some kernels make more where it is.
        self.done = False


class OpTape:
    """Records ops during forward; runs them again on demand, each at most once, freeing what nothing needs any more."""

    def __init__(self) -> None:
        self._made: dict[int, RecomputedStorage] = {}
        self._records: dict[int, RecordedOp] = {}
        self._recording = True
        self._handed_over = False

    # Forward -----------------------------------------------------------------

    def recomputed_storage_of(self, tensor: Tensor) -> RecomputedStorage | None:
        """The storage under ``tensor`` if an op on the tape made it and only such ops changed it since."""
        found = self._under(tensor)
        # Fewer changes are no sign of others: pieces of ``unsafe_split`` count their own alone, ``_foreach`` ops none.
        return found if found is not None and version_of(tensor) <= found.base + found.version else None

    def _under(self, tensor: Tensor) -> RecomputedStorage | None:
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        found = self._made.get(storage._cdata)
        # An address may be used again after its storage is gone.
        return found if found is not None and found.live() is storage else None

    def spoil(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op that is not recorded is about to change storages in place: from now on they can only be kept."""
        for tensor in traits_of(op).writes(args, kwargs):
            found = self._under(tensor)
            if found is not None:
                self._settle(found)
                del self._made[tensor.untyped_storage()._cdata]

    def finish(self) -> None:
        """The call is over."""
        self._recording = False
        self._made.clear()

    def hand_over(self, holder_of: Callable[[Tensor], TensorStandIn]) -> None:
        """Let somebody else hold what the recorded ops read from outside; for after the call."""
        for _, held in self.held():
            held.pass_on(holder_of)

    def held(self) -> list[tuple[int, RecordedInput]]:
        """What the recorded ops read from outside, each with the op's ordinal, for somebody else to hold it."""
        self._handed_over = True
        records = self._records.values()
        return [
            (record.ordinal, held) for record in records for held in recorded_inputs_in((record.args, record.kwargs))
        ]

    def trim(self) -> None:
        """Forget the ops that nothing needs; for after a call of which not only those were recorded."""
        made = [remade for record in self._records.values() for _, remade in record.allocates]
        wanted = [remade.writers[-1] for remade in made if remade.unfilled()]
        needed = {record.ordinal for writer in wanted for record in self._needed(writer)}
        for ordinal in self._records.keys() - needed:
            for remade, _ in self._records.pop(ordinal).reads:
                remade.pending -= 1

    def settle(self) -> None:
        """Fill every placeholder and take no more: what comes now may change what the recorded ops read."""
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast(), torch.no_grad():
            for remade in [remade for record in self._records.values() for _, remade in record.allocates]:
                self._settle(remade)
        self._made.clear()

    def _settle(self, remade: RecomputedStorage) -> None:
        storage = remade.live()
        for lazy in remade.unfilled():
            if storage is not None:
                lazy.fill_from(storage)
            else:
                lazy.tensor()

    def run(self, ordinal: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and record it."""
        traits = traits_of(op)
        written = traits.writes(args, kwargs) if traits.changes_in_place else ()
        if any(self.recomputed_storage_of(tensor) is None for tensor in written):
            self.spoil(op, args, kwargs)
            return op(*args, **kwargs)  # It changes what is kept, and must not do so twice.
        record = RecordedOp(ordinal, op, traits)
        given: set[int] = set()
        record.args = self._encoded(args, record, given)
        if kwargs:
            record.kwargs = {name: self._encode(value, record, given) for name, value in kwargs.items()}
        if traits.random:
            record.random = drawing_state(args, kwargs)
        result = op(*args, **kwargs)
        for tensor in written:
            found = self.recomputed_storage_of(tensor)
            if found is not None:
                found.written(ordinal)
                record.writes.append((found, found.version))
        if not traits.aliases:
            self._register(result, record, given)
        for remade, version in record.reads:
            remade.readers[version].append(ordinal)
            remade.pending += 1
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
            remade = self._made[key] = RecomputedStorage(weakref.ref(storage), version_of(tensor), record.ordinal)
            record.allocates.append((leaf, remade))

    def _encoded(self, args: tuple[Any, ...], record: RecordedOp, given: set[int]) -> list[Any]:
        if record.traits.shape_only and args[0].layout is torch.strided:
            return [_ShapeOnly(args[0]), *(self._encode(value, record, given) for value in args[1:])]
        return [self._encode(value, record, given) for value in args]

    def _encode(self, value: Any, record: RecordedOp, given: set[int]) -> Any:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                return RecordedInput(without_graph(value))
            storage = value.untyped_storage()
            key = storage._cdata
            given.add(key)
            found = self._made.get(key)
            if found is None or found.live() is not storage or version_of(value) > found.base + found.version:
                return RecordedInput(without_graph(value))
            record.reads.append((found, found.version))
            return _RecomputedView(found, value)
        if isinstance(value, (list, tuple)):
            return [self._encode(item, record, given) for item in value]
        return value

    # Backward ----------------------------------------------------------------

    def make(self, remade: RecomputedStorage) -> None:
        """Make a storage again, in its last version."""
        if self._handed_over:  # Who holds something may have to run a part of the model for it, gradients and all.
            for record in self._needed(remade.writers[-1]):
                for held in recorded_inputs_in((record.args, record.kwargs)):
                    held.tensor()
        with running_again(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast(), torch.no_grad():
            if self._recording and remade.live() is not None:
                self._settle(remade)
                return
            needed = self._needed(remade.writers[-1])
            for record in needed:
                _again(record)
        if self._recording:  # A backward inside the call: what it had made is recorded no further.
            known = {id(made) for record in needed for _, made in record.allocates}
            self._made = {key: made for key, made in self._made.items() if id(made) not in known}

    def _needed(self, wanted: int) -> list[RecordedOp]:
        """The ops that must run before and including ``wanted``, in order."""
        found: dict[int, RecordedOp] = {}
        waiting = [wanted]
        while waiting:
            ordinal = waiting.pop()
            record = self._records[ordinal]
            if record.done or ordinal in found:
                continue
            found[ordinal] = record
            waiting.extend(remade.writers[version] for remade, version in record.reads)
            for remade, version in record.writes:
                # Whoever reads the version before must do so before it is overwritten.
                waiting.extend(remade.readers[version - 1])
        return [found[ordinal] for ordinal in sorted(found)]


def _again(record: RecordedOp) -> None:
    args = [_decoded(value) for value in record.args]
    if record.traits.renews_statistics(tuple(args)):
        for place in record.traits.statistics:  # They have been updated once, by the forward.
            args[place] = _spare(args[place])
    kwargs = {name: _decoded(value) for name, value in record.kwargs.items()}
    if record.traits.shape_only and isinstance(record.args[0], _ShapeOnly):
        kwargs["device"] = kwargs.get("device") or record.args[0].device
    torch._C._set_grad_enabled(record.grad)
    with drawing_as(record.random):
        result = record.op(*args, **kwargs)
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    record.done = True
    record.args, record.kwargs = (), {}
    for leaf, remade in record.allocates:
        _made_again(remade, 0, outputs[leaf])
    for remade, version in record.writes:
        assert remade.root is not None
        _made_again(remade, version, remade.root)
    for remade, _ in record.reads:
        remade.pending -= 1
        if remade.pending == 0:
            remade.root = None


def _spare(statistics: Tensor | None) -> Tensor | None:
    return None if statistics is None else statistics.clone()


def _made_again(remade: RecomputedStorage, version: int, root: Tensor) -> None:
    if version == remade.version:
        for lazy in remade.unfilled():
            lazy.fill(root)
    # The writer that changes it next is a reader of it too.
    remade.root = root if remade.pending else None


def _decoded(value: Any) -> Any:
    if isinstance(value, _STAND_INS):
        return value.tensor()
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value
