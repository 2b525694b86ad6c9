"""The trace of one real step: which module calls ran, what they took, returned and saved, and every op."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.recomputation.op_schema import traits_of, why_not_rerunnable
from profiler.workload.autograd_nodes import next_node
from profiler.workload.compiled_forwards import leave_uncompiled, plain_name, unwrapped
from profiler.workload.forward_patches import Forward, ForwardPatches
from profiler.workload.snapshot import RandomState
from profiler.workload.storages import StorageTable
from profiler.workload.tensor_trees import opaque_holder, tensors_in
from profiler.workload.workload import Workload

leave_uncompiled(__name__)


@dataclass(slots=True)
class Leaf:
    """A tensor that goes into or comes out of a call: its storage number, and the object's own identity."""

    storage: int | None
    identity: int
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of one module. Positions count ops and saved tensors of the forward, in order.

    Attributes:
        name: the module's name in the model.
        index: how many calls of the same module came before.
        parent: position of the enclosing call in ``Trace.calls``; -1 for the model itself.
        first_op, end_op: its ops are ``Trace.ops[first_op:end_op]``.
        first_save, end_save: its saved tensors are ``Trace.saves[first_save:end_save]``.
        opaque: class of an object in its arguments or output that holds tensors but is no known container.
        side_effect: what else it changed that a second run would change again.
        goes_backward: some of what it saved was used before the step's forward was over.
    """

    name: str
    module: nn.Module
    index: int
    parent: int
    inputs: list[Leaf]
    first_op: int
    first_save: int
    first_node: int
    end_op: int = 0
    end_save: int = 0
    end_node: int = 0
    outputs: list[Leaf] = field(default_factory=list)
    mutates_input: bool = False
    draws_random: bool = False
    mutated_buffers: tuple[str, ...] = ()
    opaque: str = ""
    side_effect: str = ""
    goes_backward: bool = False


@dataclass(slots=True)
class Save:
    """A tensor that autograd saved: its storage, how many ops had run before, and in which module."""

    storage: int | None
    op: int
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What an op did with storages that were there before; versions count changes in place during the step.

    Attributes:
        reads: pairs (storage, version) whose contents it read.
        writes: storages that it changed in place.
        renews: running statistics that it changed without having read them.
        looks: it returned views of what it read, and touched no contents.
        blank: what it made holds nothing yet.
        fills: what it changed need not have held anything.
        random: it drew random numbers.
        not_rerunnable_reason: why it must not run again; empty where it may.
    """

    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[int, ...] = ()
    renews: tuple[int, ...] = ()
    looks: bool = False
    blank: bool = False
    fills: bool = False
    random: bool = False
    not_rerunnable_reason: str = ""


@dataclass(slots=True, kw_only=True)
class Op:
    """One aten op as it was dispatched."""

    name: str
    module: str
    side: str
    seconds: float
    output_bytes: int
    storages: tuple[int, ...]
    node: int
    access: Access
    kept: bool = False


@dataclass(slots=True)
class Trace:
    """One traced step.

    Attributes:
        calls, saves, ops, backward_ops: in order.
        storages: all that it met, by number.
        always_alive: those of parameters, buffers and the batch.
        casts: those that autocast made of parameters, and caches until the forward ends.
        versions: how often each was changed in place until the end of the forward.
    """

    calls: list[Call] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    backward_ops: list[Op] = field(default_factory=list)
    storages: StorageTable = field(default_factory=StorageTable)
    always_alive: set[int] = field(default_factory=set)
    casts: set[int] = field(default_factory=set)
    versions: dict[int, int] = field(default_factory=dict)


def trace_step(workload: Workload) -> Trace:
    """Run one step (no optimizer) and record it.

    The step is run with gradients cleared; the caller preserves the workload.
    """
    recorder = Recorder(workload)
    patches = ForwardPatches()
    try:
        modules = [(plain_name(n), m) for n, m in workload.model.named_modules() if unwrapped(m) is m]
        for name, module in modules:
            patches.wrap(module, lambda forward, n=name, m=module: recorder.recorded(forward, n, m))
        workload.zero_grad()
        with recorder.mode:
            with recorder.saving():
                loss = workload.forward()
            recorder.begin_backward()
            loss.backward()
        del loss
    finally:
        patches.remove()
        workload.zero_grad()
    return recorder.finish()


class Recorder:
    """Records the calls, the saved tensors and, in its ``mode``, the ops of one step.

    Args:
        workload: whose step it is.
        storages: the numbers of storages to go on with; None to begin anew.
    """

    def __init__(self, workload: Workload, storages: StorageTable | None = None) -> None:
        self.trace = Trace(storages=storages or StorageTable())
        self.side = "forward"
        self.mode = _OpMode(self)
        self.paused = False
        self._open: list[int] = []
        self._counts: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._versions: dict[int, int] = {}
        table = self.trace.storages
        persistent = [*workload.model.parameters(), *workload.model.buffers(), *tensors_in(workload.inputs)]
        self.trace.always_alive = table.numbers(persistent)
        self._device = workload.device
        self._autocast = workload.autocast
        self._castable = {id(p) for p in workload.model.parameters() if p.requires_grad and p.dtype is torch.float32}
        self._persistent = [*workload.model.parameters(), *workload.model.buffers()]

    @property
    def module(self) -> str:
        return self.trace.calls[self._open[-1]].name if self._open else ""

    def recorded(self, forward: Forward, name: str, module: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            # A checkpoint that the model brings along runs modules again in backward: no calls of the step.
            if self.paused or self.side == "backward" or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with self._off():
                call, watch = self._enter(name, module, (args, kwargs))
            try:
                output = forward(*args, **kwargs)
            finally:
                self._open.pop()
            with self._off():
                self._leave(call, watch, output)
            return output

        return run

    @contextmanager
    def _off(self) -> Iterator[None]:
        """Our own tensor work is no op of the model."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def _enter(self, name: str, module: nn.Module, arguments: Any) -> tuple[Call, _Watch]:
        tensors = tensors_in(arguments)
        call = Call(
            name=name,
            module=module,
            index=self._counts.get(id(module), 0),
            parent=self._open[-1] if self._open else -1,
            inputs=[self._leaf(t) for t in tensors],
            first_op=len(self.trace.ops),
            first_save=len(self.trace.saves),
            first_node=next_node(),
        )
        self._counts[id(module)] = call.index + 1
        self._open.append(len(self.trace.calls))
        self.trace.calls.append(call)
        call.opaque = opaque_holder(arguments)
        return call, _Watch(module, arguments, self._persistent)

    def _leave(self, call: Call, watch: _Watch, output: Any) -> None:
        call.end_op, call.end_save = len(self.trace.ops), len(self.trace.saves)
        call.end_node = next_node()
        call.outputs = [self._leaf(t) for t in tensors_in(output)]
        call.mutates_input = watch.inputs_changed()
        call.draws_random = watch.random_advanced()
        call.mutated_buffers = watch.changed_buffers()
        call.opaque = call.opaque or opaque_holder(watch.arguments) or opaque_holder(output)
        call.side_effect = watch.side_effect()

    def _leaf(self, tensor: Tensor) -> Leaf:
        # Identities are compared later, so the objects must not be freed in between.
        self._alive.append(tensor)
        number = self.trace.storages.number(tensor)
        return Leaf(number, id(tensor), tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
            with self._off():
                self.trace.saves.append(Save(self.trace.storages.number(tensor), len(self.trace.ops), self.module))
                return tensor.detach(), tuple(self._open)

        def unpack(packed: tuple[Tensor, tuple[int, ...]]) -> Tensor:
            tensor, calls = packed
            if self.side == "forward":
                for position in calls:
                    self.trace.calls[position].goes_backward = True
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def access(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Access:
        """What an op is about to read and write."""
        table, versions, traits = self.trace.storages, self._versions, traits_of(op)
        skipped = {0} if traits.shape_only else set()
        renewed = set(traits.statistics) if traits.renews_statistics(args) else set()
        skipped |= renewed
        read = tensors_in(([value for i, value in enumerate(args) if i not in skipped], kwargs))
        writes = table.numbers(traits.writes(args, kwargs))
        access = Access(
            reads=tuple((number, versions.get(number, 0)) for number in sorted(table.numbers(read))),
            writes=tuple(sorted(writes)),
            renews=tuple(sorted(table.numbers(tensors_in([args[i] for i in renewed if i < len(args)])))),
            looks=traits.aliases and not writes,
            blank=traits.blank,
            fills=traits.fills,
            random=traits.random,
            not_rerunnable_reason=why_not_rerunnable(traits, args, kwargs),
        )
        for number in writes:
            versions[number] = versions.get(number, 0) + 1
        return access

    def record(self, name: str, seconds: float, outputs: list[Tensor], known: set[int], access: Access) -> None:
        table = self.trace.storages
        numbers = tuple(sorted(table.numbers(outputs) - known))
        current = torch._C._current_autograd_node() if self.side == "backward" else None
        op = Op(
            name=name,
            module=self.module,
            side=self.side,
            seconds=seconds,
            output_bytes=table.total_bytes(numbers),
            storages=numbers,
            node=current._sequence_nr() if current is not None else next_node() - 1,
            access=access,
        )
        (self.trace.ops if self.side == "forward" else self.trace.backward_ops).append(op)

    def note_cast(self, op: Any, args: tuple[Any, ...], output: Any) -> None:
        """Autocast caches what it casts of trained float32 parameters, not of views of them (ATen's cached_cast)."""
        if self.side != "forward" or self._autocast is None or op is not torch.ops.aten._to_copy.default:
            return
        # It is excluded while it casts by itself, and not where a model calls ``to``.
        own = not torch.is_autocast_enabled(self._device.type) and torch.is_autocast_cache_enabled()
        if own and id(args[0]) in self._castable and output.dtype is self._autocast:
            self.trace.casts |= self.trace.storages.numbers([output])

    def begin_backward(self) -> None:
        self.side = "backward"
        self.trace.versions = dict(self._versions)

    def finish(self) -> Trace:
        trace = self.trace
        saved = {save.storage for save in trace.saves} - trace.always_alive
        for op in trace.ops:
            op.kept = any(number in saved for number in op.storages)
        module_of: dict[int, str] = {}
        for op in trace.ops:
            module_of.setdefault(op.node, op.module)  # The first op with a node's number is the one that made it.
        for op in trace.backward_ops:
            op.module = module_of.get(op.node, "")
        self._alive.clear()
        return trace


class _OpMode(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = self._recorder
        kwargs = kwargs or {}
        if recorder.paused:
            return func(*args, **kwargs)
        known = recorder.trace.storages.numbers(tensors_in((args, kwargs)))
        access = recorder.access(func, args, kwargs)
        seconds, output = _timed(lambda: func(*args, **kwargs), recorder._device)
        recorder.record(str(func), seconds, tensors_in(output), known, access)
        recorder.note_cast(func, args, output)
        return output


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    if device.type != "cuda":
        begin = time.perf_counter()
        output = run()
        return time.perf_counter() - begin, output
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(torch.cuda.current_stream(device))
    output = run()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return start.elapsed_time(end) / 1000.0, output


class _Watch:
    """What a call changes beside its output: its inputs, random generators, buffers and parameters."""

    def __init__(self, module: nn.Module, arguments: Any, persistent: list[Tensor]) -> None:
        self._module = module
        self.arguments = arguments
        self._inputs = [(tensor, tensor._version) for tensor in tensors_in(arguments)]
        self._random = RandomState.capture()
        self._buffers = {name: (b, b.clone()) for name, b in module.named_buffers()}
        own = {id(buffer) for buffer, _ in self._buffers.values()}
        self._others = [(tensor, tensor._version) for tensor in persistent if id(tensor) not in own]

    def inputs_changed(self) -> bool:
        return any(tensor._version != version for tensor, version in self._inputs)

    def random_advanced(self) -> bool:
        return self._random.torch_differs()

    def changed_buffers(self) -> tuple[str, ...]:
        now = dict(self._module.named_buffers())
        return tuple(
            name
            for name, (buffer, value) in self._buffers.items()
            if now.get(name) is not buffer or not torch.equal(buffer, value)
        )

    def side_effect(self) -> str:
        if any(tensor._version != version for tensor, version in self._others):
            return "it changes a parameter, or a buffer of another module"
        if self._random.host_differs():
            return "it draws from Python's or numpy's random generator"
        return ""
