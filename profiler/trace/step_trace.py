"""Running one real step so that its module calls, saved tensors and ops are recorded.

Of a compiled step a second trace says what goes into its stages, comes out of them and is saved once they are compiled.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils.weak import WeakTensorKeyDictionary

from profiler.current_device import host_seconds
from profiler.recomputation.head_output import HeadOutput
from profiler.recomputation.module_rerun import RERUN_DEPTH
from profiler.recomputation.op_schema import traits_of
from profiler.recomputation.saved_tensors import version_of
from profiler.trace.step_record import Access, Call, Leaf, Op, Save, SavedInGraph, Trace, ValueOp
from profiler.workload.compiled_forwards import leave_uncompiled, plain_name
from profiler.workload.custom_step import graph_nodes, next_node
from profiler.workload.data_parallel import SHARDING, unsharded_tensors
from profiler.workload.forward_patches import Forward, ForwardPatches
from profiler.workload.given_models import named_modules
from profiler.workload.random_states import RandomState
from profiler.workload.reachable import tensors_held
from profiler.workload.tensor_memory import same_values
from profiler.workload.tensor_parts import (
    COLLECTIVES,
    ShownElements,
    StorageTable,
    any_distributed,
    has_storage,
    is_dense,
    sizes_of,
)
from profiler.workload.tensor_trees import objects_in, opaque_holder, tensors_in
from profiler.workload.workload import OnPhase, StepPhase, Workload

leave_uncompiled(__name__)


# A Taylor series of a degree that is chosen by the matrix's norm.
_BY_NORM = ("aten::linalg_matrix_exp",)
_MASKS = (torch.bool, torch.uint8)


def trace_step(workload: Workload) -> Trace:
    """Run one step (no optimizer) and record it.

    The step is run with gradients cleared; the caller preserves the workload.
    """
    recorder = StepRecorder(workload)
    return recorder.record_step(named_modules(workload.model), recorder)


def trace_forward(workload: Workload) -> Trace:
    """Run one forward that keeps nothing for backward, and record it: all of a trace but what backward shows.

    Raises:
        ValueError: the forward goes backward through itself.
    """
    recorder = StepRecorder(workload, keeps=False)
    with first_forward(workload):
        return recorder.record_step(named_modules(workload.model), recorder)


@contextmanager
def first_forward(workload: Workload) -> Iterator[None]:
    """Has the first of several forwards measured inside: nothing has to be kept before it. They are alike."""
    custom = workload.custom_step
    measured = 0 if custom is None else custom.measured
    try:
        if custom is not None:
            custom.measured = 0
        yield
    finally:
        if custom is not None:
            custom.measured = measured


class StepRecorder(TorchDispatchMode):
    """Records the calls, the saved tensors and, where it is entered as a mode, the ops of one step.

    Args:
        workload: the workload of the step.
        storages: the numbers of storages to go on with; None to begin anew.
        keeps: whether what autograd saves is kept; without, the step ends where backward would begin.
    """

    def __init__(self, workload: Workload, storages: StorageTable | None = None, *, keeps: bool = True) -> None:
        super().__init__()
        self._keeps = keeps
        self._leaves_out_reruns = False
        self.trace = Trace(storages=storages or StorageTable())
        self.side: Literal["forward", "backward"] = "forward"
        self.paused = False
        self._open: list[int] = []
        self._counts: dict[int, int] = {}
        self._identities: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._known_leaves = itertools.count()
        self._packed: list[tuple[Save, weakref.ref[SavedInGraph]]] = []
        self._just_saved: list[tuple[Save, ShownElements]] = []  # since the last op
        self._versions: dict[int, int] = {}
        self._workload = workload
        self._persistent = [*workload.model.parameters(), *workload.model.buffers()]
        self.trace.always_alive = self.trace.storages.numbers(
            [
                *self._persistent,
                *unsharded_tensors(workload.model),
                *tensors_held(workload.inputs),
                *workload.held_by_loss,
                *(workload.held_by_loop if workload.custom_step else ()),
            ]
        )
        self._device = workload.device
        self._autocast = workload.autocast
        self._castable = {id(p) for p in workload.model.parameters() if p.requires_grad and p.dtype is torch.float32}

    @property
    def module(self) -> str:
        return self.trace.calls[self._open[-1]].name if self._open else ""

    def record_step(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        mode: AbstractContextManager[Any],
        run: Callable[[OnPhase], object] | None = None,
    ) -> Trace:
        """Run a step's forward and backward.

        Args:
            modules: the modules whose calls are recorded, with their names.
            mode: the recorder, or a null context where the step shows no ops.
            run: the function that runs the step, and tells of its phases; recomputed ops are no part of it. None for
                the workload's.
        """
        patches = ForwardPatches()
        try:
            for name, module in modules:
                patches.wrap(module, lambda forward, n=name, m=module: self.recorded(forward, n, m))
            self.paused = True
            self._leaves_out_reruns = run is not None
            with mode, self.saving(), _lists_noted(self._note_list):
                if run is not None:
                    run(self._begin)
                else:
                    self._workload.step(self._begin, self._until)
        finally:
            patches.remove()
            self._workload.zero_grad()
        return self.finished_trace()

    @property
    def _until(self) -> StepPhase | None:
        """Returns the phase that ends the step; a custom step runs to its end, so that it leaves what a step leaves."""
        if not self._keeps:
            return "backward"
        return "optimizer" if self._workload.custom_step is None else None

    def _begin(self, phase: StepPhase, loss: Tensor | None) -> None:
        """Begins to record with the measured forward, and its backward."""
        self.paused = phase not in ("forward", "backward")
        if phase == "backward":
            if loss is not None:
                _note_hidden(self.trace, loss)
            self.begin_backward()
        elif self.side == "backward" and not self.trace.sparse_gradients:
            self.trace.sparse_gradients = [
                plain_name(name)
                for name, parameter in self._workload.model.named_parameters()
                if parameter.grad is not None and parameter.grad.layout is not torch.strided
            ]

    def recorded(self, forward: Forward, name: str, module: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            # A checkpoint that the model brings along runs modules again in backward: no calls of the step.
            if self.paused or self.side == "backward" or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with self._not_recording():
                call, changes = self._enter(name, module, (args, kwargs))
            try:
                output = forward(*args, **kwargs)
            finally:
                self._open.pop()
            with self._not_recording():
                self._leave(call, changes, output)
            return output

        return run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # As in ``RecordingMode``: the wrapper costs several microseconds an op.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any_distributed(types):
            self._note_distributed()
            return NotImplemented
        kwargs = kwargs or {}
        # Marks of the user's, or of an optimizer's zero_grad; what gathers parameters is no op of the model, either.
        beside = func.namespace in ("profiler", "prim") or SHARDING.get()
        if self.paused or beside or (self._leaves_out_reruns and RERUN_DEPTH.get() > 0):
            return func(*args, **kwargs)
        if func.namespace == COLLECTIVES:
            self._note_distributed()
        known = self.trace.storages.numbers(tensors_in((args, kwargs)))
        access = self.access(func, args, kwargs)
        if access.writes:
            self._note_filled(func, args, kwargs)
        self._just_saved.clear()
        self.note_values(func, args, kwargs)
        seconds, output = _timed(lambda: func(*args, **kwargs), self._device)
        self.record(str(func), seconds, tensors_in(output), known, access)
        self.note_cast(func, args, output)
        return output

    def _note_distributed(self) -> None:
        if not self.paused and self.side == "forward":
            for position in self._open:
                self.trace.calls[position].distributed = True

    @contextmanager
    def _not_recording(self) -> Iterator[None]:
        """Our own tensor work is no op of the model, and does not come here."""
        before, self.paused = self.paused, True
        depth = torch._C._len_torch_dispatch_stack()
        on_top = depth > 0 and torch._C._get_dispatch_stack_at(depth - 1) is self
        try:
            with _pop_mode_temporarily() if on_top else nullcontext():
                yield
        finally:
            self.paused = before

    def _enter(self, name: str, module: nn.Module, arguments: Any) -> tuple[Call, _CallChanges]:
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
        return call, _CallChanges(module, arguments, self._persistent)

    def _leave(self, call: Call, changes: _CallChanges, output: Any) -> None:
        call.end_op, call.end_save = len(self.trace.ops), len(self.trace.saves)
        call.end_node = next_node()
        call.outputs = [self._leaf(t) for t in tensors_in(output)]
        if any(isinstance(t, HeadOutput) for t in tensors_in(output)):
            for position in (*self._open, self.trace.calls.index(call)):
                self.trace.calls[position].waits = True
        call.mutates_input = changes.inputs_changed()
        call.draws_random = changes.random.torch_differs()
        call.mutated_buffers = changes.changed_buffers()
        call.opaque = call.opaque or opaque_holder(changes.arguments) or opaque_holder(output)
        call.fills = changes.filled(output)
        call.side_effect = changes.side_effect()
        call.scripted = _scripted_part(call.module)
        call.fills_late = any(save.filled_late for save in self.trace.saves[call.first_save : call.end_save])

    def _leaf(self, tensor: Tensor) -> Leaf:
        # By a number that no other tensor gets, also when this one is gone: holding it would take memory.
        if (identity := self._identities.get(tensor)) is None:
            identity = self._identities[tensor] = next(self._known_leaves)
        number = self.trace.storages.number(tensor)
        return Leaf(number, identity, sizes_of(tensor), str(tensor.dtype), tensor.requires_grad, version_of(tensor))

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(tensor: Tensor) -> Any:
            if self.paused or self.side == "backward":
                return tensor.detach()
            with self._not_recording():
                save = Save(self.trace.storages.number(tensor), len(self.trace.ops), self.module)
                self.trace.saves.append(save)
                if has_storage(tensor):
                    self._just_saved.append((save, ShownElements.of(tensor)))
                packed = SavedInGraph(tensor.detach() if self._keeps else None, tuple(self._open))
                self._packed.append((save, weakref.ref(packed)))
                return packed

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if packed.tensor is None:
                raise ValueError(
                    "a forward that goes backward through itself (for forces, or a penalty on gradients) cannot be "
                    "profiled within a limit; compute that in a step of its own"
                )
            if self.side == "forward":
                for position in packed.calls:
                    self.trace.calls[position].goes_backward = True
            return packed.tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def access(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Access:
        """Returns the storages that an op is about to read and write."""
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
            fills=traits.fills,
            random=traits.random,
        )
        for number in writes:
            versions[number] = versions.get(number, 0) + 1
        return access

    def _note_filled(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Marks tensors saved since the last op that this one writes to; other parts of their storages do not count."""
        written = [ShownElements.of(t) for t in traits_of(op).writes(args, kwargs) if has_storage(t)]
        for save, saved in self._just_saved:
            save.filled_late = any(saved.meets(elements) for elements in written)

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

    def note_values(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember an op by whose values bytes differ."""
        if deciding := _deciding_tensors(op, args, kwargs):
            self._note_deciding(str(op.overloadpacket), deciding, _is_branch(op))

    def _note_list(self, tensor: Tensor, values: Any) -> None:
        """Remember a tensor by whose whole numbers Python may divide others, as a mixture of experts does."""
        sizes = isinstance(values, list) and len(values) > 1 and all(type(number) is int for number in values)
        if sizes and not tensor.requires_grad:
            self._note_deciding("tolist", [tensor], False)

    def _note_deciding(self, name: str, deciding: Sequence[Tensor], branch: bool) -> None:
        numbers = frozenset(self.trace.storages.numbers(deciding))
        self.trace.by_values.append(ValueOp(len(self.trace.ops), name, self.module, branch, numbers))

    def note_cast(self, op: Any, args: tuple[Any, ...], output: Any) -> None:
        """Autocast caches what it casts of trained float32 parameters, not of views of them (ATen's cached_cast)."""
        if self.side != "forward" or self._autocast is None or op is not torch.ops.aten._to_copy.default:
            return
        # It is excluded while it casts by itself, and not where a model calls ``to``.
        by_autocast = not torch.is_autocast_enabled(self._device.type) and torch.is_autocast_cache_enabled()
        if by_autocast and id(args[0]) in self._castable and output.dtype is self._autocast:
            self.trace.casts |= self.trace.storages.numbers([output])

    def begin_backward(self) -> None:
        self.side = "backward"
        for save, packed in self._packed:
            save.unused = packed() is None

    def finished_trace(self) -> Trace:
        trace = self.trace
        saved = trace.saved(0, len(trace.saves))
        for op in trace.ops:
            op.kept = any(number in saved for number in op.storages)
        module_of: dict[int, str] = {}
        for op in trace.ops:
            module_of.setdefault(op.node, op.module)  # The first op with a node's number is the one that made it.
        for op in trace.backward_ops:
            op.module = module_of.get(op.node, "")
        return trace


@contextmanager
def _lists_noted(note: Callable[[Tensor, Any], None]) -> Iterator[None]:
    """Has ``note`` called inside with each tensor of which Python reads a list, and with the list: no op shows that."""
    own, before = Tensor.tolist, vars(Tensor).get("tolist")

    def read(tensor: Tensor) -> Any:
        values = own(tensor)
        note(tensor, values)
        return values

    setattr(Tensor, "tolist", read)  # noqa: B010 - its own takes ``self``
    try:
        yield
    finally:
        if before is None:
            del Tensor.tolist
        else:
            setattr(Tensor, "tolist", before)  # noqa: B010


def _scripted_part(module: nn.Module) -> str:
    """A module in it that ``torch.jit.script`` or ``torch.jit.trace`` has made, in words; empty where there is none."""
    parts = (name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule))
    return next((f"its {name}" if name else "it" for name in parts), "")


def _timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    if device.type != "cuda":
        begin = host_seconds()
        output = run()
        return host_seconds() - begin, output
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(torch.cuda.current_stream(device))
    output = run()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return start.elapsed_time(end) / 1000.0, output


def _note_hidden(trace: Trace, loss: Tensor) -> None:
    """Note with each call which function keeps tensors that were made in it where no saved-tensor hook sees them.

    They are attributes of its context, as in bitsandbytes' 8-bit layers.

    Args:
        trace: the trace of the forward.
        loss: the loss with its graph; backward has not begun.
    """
    for node in graph_nodes(loss):
        hidden = trace.storages.numbers(tensors_in(getattr(node, "__dict__", {}))) - trace.always_alive
        if not hidden:
            continue
        number, function = node._sequence_nr(), type(node).__name__.removesuffix("Backward")
        for call in trace.calls:
            if call.first_node <= number < call.end_node and hidden - call.input_storages:
                call.hides = function
                call.hidden |= hidden - call.input_storages


class _CallChanges:
    """The changes of a call besides its output: of inputs, random generators, buffers and parameters."""

    def __init__(self, module: nn.Module, arguments: Any, persistent: list[Tensor]) -> None:
        self._module = module
        self.arguments = arguments
        self.inputs = [(tensor, tensor._version) for tensor in tensors_in(arguments)]
        self._objects = [(value, tensors_in(value)) for value in objects_in(arguments)]
        self.random = RandomState()
        self._buffers = {name: (b, b.clone()) for name, b in module.named_buffers()}
        of_module = {id(buffer) for buffer, _ in self._buffers.values()}
        self._others = [(tensor, tensor._version) for tensor in persistent if id(tensor) not in of_module]

    def inputs_changed(self) -> bool:
        """Whether an input was changed in place."""
        return _were_changed(self.inputs)

    def filled(self, output: Any) -> str:
        """Class of an object in its inputs that has tensors now that it had not, and that are not in the output."""
        returned = {id(tensor) for tensor in tensors_in(output)}
        for value, before in self._objects:
            if {id(tensor) for tensor in tensors_in(value)} - {id(tensor) for tensor in before} - returned:
                return type(value).__name__
        return ""

    def changed_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that are others now, or hold something else."""
        now = dict(self._module.named_buffers())
        return tuple(
            name
            for name, (buffer, value) in self._buffers.items()
            if now.get(name) is not buffer or not same_values(buffer, value)
        )

    def side_effect(self) -> str:
        """Returns the other changes that a recomputation would repeat, in words; empty for none."""
        if _were_changed(self._others):
            return "it changes a parameter, or a buffer of another module"
        if any(not is_dense(self._buffers[name][0]) for name in self.changed_buffers()):
            return "it changes a buffer that is sparse, nested or quantized"
        if self.random.host_differs():
            return "it draws from Python's or numpy's random generator"
        return ""


def _were_changed(tensors: list[tuple[Tensor, int]]) -> bool:
    return any(tensor._version != version for tensor, version in tensors)


def _deciding_tensors(op: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """The tensors whose values decide how many bytes an op takes, or which way Python goes; none where shapes do."""
    if not isinstance(op, torch._ops.OpOverload):
        return []
    if op._schema.name in _BY_NORM or _is_branch(op):
        return tensors_in([args, kwargs])
    if torch.Tag.dynamic_output_shape not in op.tags:
        return []
    if op._schema.name == "aten::index":  # The tag stands for masks; with positions the result has their shape.
        return [tensor for tensor in tensors_in([args[1:], kwargs]) if tensor.dtype in _MASKS]
    return tensors_in([args, kwargs])


def _is_branch(op: Any) -> bool:
    """Whether an op hands a value to Python, which may go another way with another one."""
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.data_dependent_output in op.tags


def trace_compiled(workload: Workload, trace: Trace, calls: Sequence[Call]) -> tuple[Trace, list[Call]]:
    """Run one step again, compiled this time, and record some of its calls as they are then.

    Compiled code shows no ops: those of ``trace`` stay, and the new calls stand
    where the old ones stood among them.

    Args:
        workload: a workload whose model is compiled, or something in it.
        trace: the trace of the same step, uncompiled.
        calls: the calls to record; none inside of another.

    Raises:
        ValueError: the compiled step does not make such a call.
    """
    modules = {id(call.module): (call.name, call.module) for call in calls}.values()
    compiled = StepRecorder(workload, trace.storages).record_step(modules, nullcontext())
    compiled_calls = [_compiled_call(compiled, call) for call in calls]
    compiled.ops = _with_stage_storages(trace, compiled_calls)
    compiled.backward_ops = trace.backward_ops
    return compiled, compiled_calls


def _compiled_call(compiled: Trace, old: Call) -> Call:
    """The call in the compiled step that is ``old`` in the uncompiled one, at the place of that among its ops."""
    key = id(old.module), old.index
    call = next((call for call in compiled.calls if (id(call.module), call.index) == key), None)
    if call is None:
        raise ValueError(f"expected the compiled step to call {old.name!r} {old.index + 1} times, got fewer calls")
    call.first_op, call.end_op = old.first_op, old.end_op
    for save in compiled.saves[call.first_save : call.end_save]:
        save.op = old.end_op  # A compiled forward saves at its end.
    return call


def _with_stage_storages(trace: Trace, calls: Iterable[Call]) -> list[Op]:
    """The ops, with the storages that compiled calls take or return: made inside the call, or just before it."""
    ops = list(trace.ops)
    known = set(trace.always_alive)
    for call in calls:
        for storages, position in ((call.input_storages, call.first_op - 1), (call.output_storages, call.end_op - 1)):
            new = storages - known
            if new and position >= 0:
                ops[position] = replace(ops[position], storages=(*ops[position].storages, *sorted(new)))
            known |= new
    return ops
