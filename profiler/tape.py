"""The tape of one stage call: the ops whose results are not kept, recorded so that backward can run them again.

What runs again are the very kernels with the very arguments that the forward
dispatched, below autograd and autocast: no module code, no hooks, no side
effects. Whatever is not made by one of those ops is either kept or held by the
op that reads it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from profiler.op_traits import OpTraits, traits_of
from profiler.rerun import RerunError

Geometry = tuple[Any, Any, int, torch.dtype]
# Whether an op runs because a tape runs it again; for those who watch a step.
RUNNING_AGAIN: ContextVar[bool] = ContextVar("RUNNING_AGAIN", default=False)


class Remade:
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
        self.waiting: list[list[weakref.ref[Lazy]]] = [[]]
        self.pending = 0
        self.root: Tensor | None = None

    def written(self, writer: int) -> None:
        """An op on the tape changes it in place."""
        self.version += 1
        self.writers.append(writer)
        self.readers.append([])
        self.waiting.append([])


class Lazy:
    """Stands in the graph for a saved tensor that is made again when backward asks for it; then holds it.

    The autograd node owns it, so what it holds goes exactly when autograd lets go of a saved tensor.
    """

    __slots__ = ("__weakref__", "_geometry", "_remade", "_tape", "_value", "_version")

    def __init__(self, tape: Tape, remade: Remade, tensor: Tensor) -> None:
        self._tape: Tape | None = tape
        self._remade = remade
        self._version = remade.version
        self._geometry = _geometry(tensor)
        self._value: Tensor | None = None
        remade.waiting[remade.version].append(weakref.ref(self))

    def tensor(self) -> Tensor:
        """The saved tensor; runs what is needed for it."""
        if self._value is None:
            assert self._tape is not None
            self._tape.make(self._remade, self._version)
        assert self._value is not None
        return self._value

    def fill(self, root: Tensor) -> None:
        """Take the tensor from the storage made again."""
        self._value = _view(root, self._geometry)
        self._tape = None


class _Made:
    """In an op's recorded arguments: a view of a storage that is made again."""

    __slots__ = ("geometry", "remade")

    def __init__(self, remade: Remade, tensor: Tensor) -> None:
        self.remade = remade
        self.geometry = _geometry(tensor)


class _Held:
    """In an op's recorded arguments: a tensor that is alive anyway, or kept for this op."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = _cut_off(tensor)
        self.version = tensor._version


class _Shape:
    """In an op's recorded arguments: a tensor of which only shape and kind matter."""

    __slots__ = ("device", "dtype", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.stride = tensor.size(), tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device


class Record:
    """One op that may run again, with its arguments."""

    __slots__ = ("args", "done", "kwargs", "makes", "op", "ordinal", "random", "reads", "traits", "writes")

    def __init__(self, ordinal: int, op: Any, traits: OpTraits) -> None:
        self.ordinal = ordinal
        self.op = op
        self.traits = traits
        self.args: Any = ()
        self.kwargs: Any = {}
        self.reads: list[tuple[Remade, int]] = []
        self.makes: list[tuple[int, Remade]] = []
        self.writes: list[tuple[Remade, int]] = []
        self.random: Any = None
        self.done = False


class Tape:
    """Records ops during forward; runs them again on demand, each at most once, freeing what nothing needs any more."""

    def __init__(self) -> None:
        self._made: dict[int, Remade] = {}
        self._records: dict[int, Record] = {}

    # Forward -----------------------------------------------------------------

    def remade_of(self, tensor: Tensor) -> Remade | None:
        """The storage under ``tensor`` if an op on the tape made it and only such ops changed it since."""
        storage = tensor.untyped_storage()
        found = self._made.get(storage._cdata)
        # An address may be used again after its storage is gone.
        if found is None or found.live() is not storage or tensor._version != found.base + found.version:
            return None
        return found

    def run(self, ordinal: int, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and record it."""
        traits = traits_of(op)
        record = Record(ordinal, op, traits)
        record.args = self._encoded(args, record, traits.shape_only)
        record.kwargs = {name: self._encode(value, record) for name, value in kwargs.items()} if kwargs else kwargs
        if traits.random:
            record.random = _random_state(args, kwargs)
        result = op(*args, **kwargs)
        for tensor in traits.writes(args, kwargs):
            found = self.remade_of(tensor)
            if found is not None:
                found.written(ordinal)
                record.writes.append((found, found.version))
        self._register(result, record)
        for remade, version in record.reads:
            remade.readers[version].append(ordinal)
            remade.pending += 1
        self._records[ordinal] = record
        return result

    def _register(self, result: Any, record: Record) -> None:
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for leaf, tensor in enumerate(outputs):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            if self._is_known(storage, record):
                continue
            remade = Remade(weakref.ref(storage), tensor._version, record.ordinal)
            self._made[storage._cdata] = remade
            record.makes.append((leaf, remade))

    def _is_known(self, storage: Any, record: Record) -> bool:
        found = self._made.get(storage._cdata)
        if found is not None and found.live() is storage:
            return True
        return any(held.tensor.untyped_storage() is storage for held in _held_in((record.args, record.kwargs)))

    def _encoded(self, args: tuple[Any, ...], record: Record, shape_only: bool) -> list[Any]:
        encoded = [self._encode(value, record) for value in args[1:]] if shape_only else None
        if encoded is not None:
            return [_Shape(args[0]), *encoded]
        return [self._encode(value, record) for value in args]

    def _encode(self, value: Any, record: Record) -> Any:
        if isinstance(value, Tensor):
            found = self.remade_of(value)
            if found is None:
                return _Held(value)
            record.reads.append((found, found.version))
            return _Made(found, value)
        if isinstance(value, (list, tuple)):
            return [self._encode(item, record) for item in value]
        return value

    # Backward ----------------------------------------------------------------

    def make(self, remade: Remade, version: int) -> None:
        """Make a storage again, in the version that was saved."""
        needed = self._needed(remade.writers[version])
        token = RUNNING_AGAIN.set(True)
        try:
            with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast(), torch.no_grad():
                for record in needed:
                    _again(record)
        finally:
            RUNNING_AGAIN.reset(token)

    def _needed(self, wanted: int) -> list[Record]:
        """The ops that must run before and including ``wanted``, in order."""
        found: dict[int, Record] = {}
        waiting = [wanted]
        while waiting:
            ordinal = waiting.pop()
            record = self._records[ordinal]
            if record.done or ordinal in found:
                continue
            found[ordinal] = record
            waiting.extend(remade.writers[version] for remade, version in record.reads)
            for remade, version in record.writes:
                waiting.append(remade.writers[version - 1])
                # Whoever reads the version before must do so before it is overwritten.
                waiting.extend(remade.readers[version - 1])
        return [found[ordinal] for ordinal in sorted(found)]


def _again(record: Record) -> None:
    args = _shaped(record) if record.traits.shape_only else [_decoded(value) for value in record.args]
    if record.traits.renews_statistics(tuple(args)):
        for place in record.traits.statistics:  # They have been updated once, by the forward.
            args[place] = None if args[place] is None else args[place].clone()
    kwargs = {name: _decoded(value) for name, value in record.kwargs.items()}
    with _random_as(record.random):
        result = record.op(*args, **kwargs)
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    record.done = True
    record.args, record.kwargs = (), {}
    for leaf, remade in record.makes:
        _made_again(remade, 0, outputs[leaf])
    del result, outputs, args, kwargs
    for remade, version in record.writes:
        assert remade.root is not None
        _made_again(remade, version, remade.root)
    for remade, _ in record.reads:
        remade.pending -= 1
        if remade.pending == 0:
            remade.root = None


def _made_again(remade: Remade, version: int, root: Tensor) -> None:
    for reference in remade.waiting[version]:
        lazy = reference()
        if lazy is not None:
            lazy.fill(root)
    # The writer that changes it next is a reader of it too.
    remade.root = root if remade.pending else None


def _shaped(record: Record) -> list[Any]:
    shape: _Shape = record.args[0]
    record.kwargs = {**record.kwargs, "device": record.kwargs.get("device") or shape.device}
    blank = torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device="meta")
    return [blank, *(_decoded(value) for value in record.args[1:])]


def _decoded(value: Any) -> Any:
    if isinstance(value, _Made):
        assert value.remade.root is not None
        return _view(value.remade.root, value.geometry)
    if isinstance(value, _Held):
        if value.tensor._version != value.version:
            raise RerunError(
                "expected a tensor that a recomputed op reads to be as it was in forward, got one that was changed in "
                "place since; change a copy, or leave this stage out of the plan"
            )
        return value.tensor
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value


def _held_in(value: Any) -> Iterator[_Held]:
    if isinstance(value, _Held):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _held_in(item)
    elif isinstance(value, dict):
        yield from _held_in(list(value.values()))


_VIEWS = torch._C.DispatchKey.ADInplaceOrView


def _cut_off(tensor: Tensor) -> Tensor:
    """The tensor without its graph, sharing its version counter; for use inside a dispatch mode.

    There torch leaves out the layer that makes a detached tensor share the counter.
    """
    without = torch._C._dispatch_tls_is_dispatch_key_excluded(_VIEWS)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS, False)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_VIEWS, without)


def _geometry(tensor: Tensor) -> Geometry:
    return tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _view(root: Tensor, geometry: Geometry) -> Tensor:
    size, stride, offset, dtype = geometry
    if root.dtype != dtype:
        whole = torch.empty(0, dtype=dtype, device=root.device)
        return whole.set_(root.untyped_storage(), offset, size, stride)
    if root.size() == size and root.stride() == stride and root.storage_offset() == offset:
        return root.detach()
    return root.as_strided(size, stride, offset)


def _random_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The states of the generators that an op may draw from; on the CPU outside of torch's allocator."""
    tensors: list[Tensor] = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return torch.get_rng_state().numpy().copy(), None
    return device, torch.cuda.get_rng_state(device)


@contextmanager
def _random_as(state: Any) -> Iterator[None]:
    """Inside, random numbers come as they came in forward; on leaving, the generators are as before."""
    if state is None:
        yield
        return
    first, cuda = state
    if cuda is None:
        now = torch.get_rng_state()
        torch.set_rng_state(torch.from_numpy(first))
    else:
        now = torch.cuda.get_rng_state(first)
        torch.cuda.set_rng_state(cuda, first)
    try:
        yield
    finally:
        if cuda is None:
            torch.set_rng_state(now)
        else:
            torch.cuda.set_rng_state(now, first)
