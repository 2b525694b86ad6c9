"""A captured call that runs as two programs: one function for autograd, generated code below it, no mode, no tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.multiprocessing.reductions import StorageWeakRef

from profiler.recomputation.dropped_call import Placeholder
from profiler.recomputation.held_inputs import BatchCopies, HeldTensor
from profiler.recomputation.saved_tensors import RerunError, Values, some_values_of
from profiler.trace.captured_call import CapturedCall
from profiler.trace.joint_graph import CaptureError, draws, is_view, step_graph_of
from profiler.trace.programs import AGAIN, AsInForward, StepOrder, outputs_program, programs_of, with_direct_calls
from profiler.workload.data_parallel import called_as_unit, shows_order_of_gradients, units_of
from profiler.workload.tensor_parts import copied_gradient_bytes
from profiler.workload.tensor_trees import tensors_in, with_tensors
from profiler.workload.torch_state import flags_now

_NORMALISES = "_native_batch_norm_legit_functional"
_GATHERED = torch.empty(0)  # in the place of a parameter that a unit of fully_shard gathers as it is called
_BOXED = hasattr(torch.autograd.Function, "boxed_grads_call")
_Code = Callable[[list[Any]], Sequence[Any]]
# Who looks at runs of modules that run as programs: each is given the module and what runs, and returns what that does.
WATCHERS: list[Callable[[nn.Module, Callable[[], Any]], Any]] = []


class HandedOver(NamedTuple):
    """A program, and what its forward has handed over to backward."""

    program: CallProgram
    tensors: list[Any]


class ProgramPlaceholder(Placeholder):
    """Stands in the graph for what the forward of a dropped program hands over."""

    __slots__ = ()

    def taken(self, *, again: bool) -> HandedOver:
        """The program whose forward has run once more, and what that handed over; ``again``: it is asked again."""
        found: HandedOver = self.filled()
        if again:
            return HandedOver(found.program, list(found.tensors))
        self.value = None
        return found


class Compiled(Protocol):
    """Makes code of a program: it takes a list of inputs, which it may empty, and returns the outputs."""

    def __call__(self, program: fx.GraphModule, *, is_backward: bool) -> _Code: ...


class CallProgram:
    """Runs calls that are alike, in the order of runs that was chosen for them.

    Args:
        captured: one of the calls.
        order: the order of the runs of its ops.
        compiled: the compiler of programs of a forward or a backward; None to run their ops one by one.

    Attributes:
        parameters: of what the forward hands over, the parameters: the place of each there, and its number among the
            inputs.
        viewed: whether a view stands for each of these: no op of backward reads it itself.
        both: the places among these of those that ops of backward and recomputed ops read.
        arguments_in_backward: numbers of the tensors among the arguments that backward reads where each op runs once.
        runs_again: whether ops of the forward are recomputed in backward.
        read_again: inputs that these read.
        held_by_backward: places among what ``BoundProgram.held`` gives of what the values that forward makes for
            backward depend on.
        draws: whether any op draws random numbers.
        differentiable: whether the call makes each tensor in the output and it takes a gradient.
        contributions: the parts of the inputs' gradients that the backward makes, in the order in which they are added
            up.
        of_parameters_last_first: places of those to parameters, whose gradients are complete in the order of this from
            its end.
    """

    def __init__(self, captured: CapturedCall, order: StepOrder, compiled: Compiled | None = None) -> None:
        self.captured = captured
        forward, backward = programs_of(captured.graph, order)
        self.parameters = _parameters_among(captured, forward)
        of_forward = _read_by_forward_alone(captured)
        self.viewed = [number in of_forward for _, number in self.parameters]
        self.runs_again = any(AGAIN in node.meta for node in backward.graph.nodes)
        sources = zip(captured.graph.inputs, captured.sources, strict=True)
        # No recomputation depends on what the call itself writes to.
        of_module = {node.name: isinstance(each, str) for node, each in sources if each not in captured.written}
        self.read_again = inputs_read_again(backward, of_module)
        again = {each.place for each in self.read_again}
        self.both = [k for k, (place, n) in enumerate(self.parameters) if place in again and n not in of_forward]
        compiled = compiled or (lambda program, is_backward: with_direct_calls(program).forward)
        self.forward_code = compiled(forward, is_backward=False)
        self._backward, self.backward_code = backward, compiled(backward, is_backward=True)
        self.outputs_code = compiled(outputs_program(captured.graph, order), is_backward=False)
        step = captured.with_arguments(step_graph_of(captured.graph))
        self.arguments_in_backward = {n for op in step.ops if op.side == "backward" for n in op.arguments}
        self.draws = any(map(draws, (*captured.graph.module.graph.nodes,)))
        takes = iter(captured.differentiable)
        self.differentiable = [passed is None and next(takes) for passed in captured.passed_on]
        self.statistics = _statistics_among(captured)
        held = [n for n, each in enumerate(captured.sources) if isinstance(each, str) and n not in self.statistics]
        made_of = _made_of(captured, forward)
        self.held_by_backward = frozenset(place for place, number in enumerate(held) if number in made_of)
        self.contributions = _contributions(captured)
        self.of_parameters_last_first = _of_parameters_last_first(captured, self.contributions)
        inputs = [number for number, _ in self.contributions]
        self.places = [inputs.index(number) for number in range(len(captured.sources))]
        tangents = [node.meta["val"] for node in captured.graph.tangents]
        self.layouts = [(tangent.size(), tangent.stride()) for tangent in tangents]

    def bound(self, module: nn.Module) -> BoundProgram:
        """The program for a module: where its parameters and buffers are looked up at every call."""
        return BoundProgram(self, module)

    def gradients(
        self, saved: list[Any], gradients: list[Tensor], flags: list[Any] | None
    ) -> tuple[Tensor | None, ...]:
        """Returns what backward contributes to the gradients of the forward's inputs; empties both lists.

        Args:
            saved: the tensors that the forward handed over.
            gradients: the gradients of the call's outputs.
            flags: torch's in forward, with which its ops are recomputed.
        """
        for number, (size, stride) in zip(self.captured.tangents, self.layouts, strict=True):
            saved.append(_as_traced(gradients[number], size, stride))
        gradients.clear()
        with torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            if flags is None or flags == flags_now():
                made = self.backward_code(saved)
            else:
                taken = [*saved]
                saved.clear()
                made = AsInForward(self._backward, flags).boxed_run(taken)
        return tuple(None if number is None else made[number] for _, number in self.contributions)


def _parameters_among(captured: CapturedCall, forward: fx.GraphModule) -> list[tuple[int, int]]:
    """Returns the parameters that a forward hands over: the place of each there, and its number among the inputs."""
    (output,) = forward.graph.find_nodes(op="output")
    inputs = {node.name: number for number, node in enumerate(captured.graph.inputs)}
    handed = output.args[0][captured.graph.forward_outputs :]
    found = [(place, inputs[node.name]) for place, node in enumerate(handed) if node.op == "placeholder"]
    return [(place, number) for place, number in found if isinstance(captured.sources[number], str)]


def _made_of(captured: CapturedCall, forward: fx.GraphModule) -> set[int]:
    """Numbers of the inputs of which the values are made that a forward hands over."""
    (output,) = forward.graph.find_nodes(op="output")
    waiting = [node for node in output.args[0][captured.graph.forward_outputs :] if node.op != "placeholder"]
    reached: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += node.all_input_nodes
    names = {node.name for node in reached if node.op == "placeholder"}
    return {number for number, node in enumerate(captured.graph.inputs) if node.name in names}


def _read_by_forward_alone(captured: CapturedCall) -> set[int]:
    """Returns the numbers of inputs that no op of backward reads: only views of forward's, and recomputed ops."""
    graph = captured.graph
    return {n for n, node in enumerate(graph.inputs) if all(user in graph.forward_ops for user in node.users)}


def _statistics_among(captured: CapturedCall) -> frozenset[int]:
    """Numbers of the inputs that are running statistics alone: what is normalised by the batch's own ignores them."""
    return frozenset(
        number
        for number, node in enumerate(captured.graph.inputs)
        if node.users and all(_NORMALISES in str(user.target) for user in node.users)
        if isinstance(captured.sources[number], str) and captured.sources[number] in captured.written
    )


def _contributions(captured: CapturedCall) -> list[tuple[int, int | None]]:
    """Each input with an output of the backward that adds to its gradient, in the order in which they are added.

    A tensor may be several inputs, of which that comes first whose gradient is made first. Those of an input keep their
    order. Inputs without a gradient come last.
    """
    graph = captured.graph
    made = {node: place for place, node in enumerate(graph.module.graph.nodes)}
    gradients = graph.outputs[graph.forward_outputs :]
    found: list[tuple[int, int, int]] = []
    for number, numbers in enumerate(captured.gradients):
        place = -1
        for each in numbers:
            place = max(place, made[gradients[each]])
            found.append((place, number, each))
    without = [number for number, numbers in enumerate(captured.gradients) if not numbers]
    return [
        *((number, each) for _, number, each in sorted(found, key=lambda one: one[0])),
        *((n, None) for n in without),
    ]


def _of_parameters_last_first(captured: CapturedCall, contributions: Sequence[tuple[int, int | None]]) -> list[int]:
    """Places of contributions to parameters, those first whose gradient is complete last."""
    complete = {name: number for number, name in enumerate(captured.complete)}
    sources = [captured.sources[number] for number, _ in contributions]
    found = [
        (complete[name], place) for place, name in enumerate(sources) if isinstance(name, str) and name in complete
    ]
    return [place for _, place in sorted(found, reverse=True)]


class BoundProgram:
    """Calls a program with the parameters and buffers of one module.

    Args:
        program: the program for modules like this one.
        module: the module whose parameters and buffers are read.

    Attributes:
        program, module: the given program and module.
        watches_gradients: whether backward looks at who else holds the gradients of what a call returned.
        gradients_held: whether others held a gradient of what a call returned when its backward was over.
        lay_otherwise: whether a gradient of what a call returned lay otherwise than the traced one.
        copied_gradient_bytes: by which more was alive while autograd copied gradients that have other strides than the
            parameter.
    """

    def __init__(self, program: CallProgram, module: nn.Module) -> None:
        self.program, self.module = program, module
        self.watches_gradients = self.gradients_held = self.lay_otherwise = False
        self.copied_gradient_bytes = 0
        tables = [None if isinstance(each, int) else _table_of(module, each) for each in program.captured.sources]
        self._sources = [*zip(tables, program.captured.sources, strict=True)]
        units, sources = units_of(module), program.captured.sources
        # Of a unit's parameters there is only this rank's part before its call.
        self._gathered = {each for each in sources if isinstance(each, str) and units.manage(_owner_of(module, each))}
        uncounted = {program.captured.sources[number] for number in program.statistics}
        self._written = [(*_table_of(module, name), name in uncounted) for name in program.captured.written]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's forward does for these arguments."""
        return self.called(args, kwargs, None, checked=True)

    def called(self, args: Any, kwargs: Any, batch: BatchCopies | None, *, checked: bool) -> Any:
        """Runs the call in a step with a batch; ``checked`` is as for ``ReadAgain``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            inputs = self._repeated(args, kwargs)
            return self._seen(lambda: self._returned(_Call.apply(self, batch, checked, *inputs), args, kwargs))

        return called_as_unit(self.module, run, args, kwargs)

    def dropping(self, saved: ProgramPlaceholder, args: Any, kwargs: Any) -> Any:
        """Runs the call without handing anything over to backward, which asks ``saved`` for it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            inputs = self._repeated(args, kwargs)
            return self._seen(lambda: self._returned(_DroppedCall.apply(self, saved, *inputs), args, kwargs))

        return called_as_unit(self.module, run, args, kwargs)

    def outputs(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Returns the outputs of a recomputation of the call, without history; buffers stay as they are."""
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            made = self._seen(lambda: self.program.outputs_code(self._inputs(args, kwargs)))
        return self._with_passed_on(made[len(self._written) :], args, kwargs)

    def handed_over(self, args: Any, kwargs: Any) -> tuple[list[Any], list[Tensor]]:
        """Recomputes the call; returns what it hands over to backward, and the tensors that it returns."""
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            made = self._seen(lambda: self.program.forward_code(self._inputs(args, kwargs)))
        returned = self.program.captured.graph.forward_outputs
        return list(made[returned:]), self._with_passed_on(made[len(self._written) : returned], args, kwargs)

    @property
    def in_order(self) -> bool:
        """Whether a call hands the gradients of parameters on in the order of eager code, by a node for each."""
        return shows_order_of_gradients(table[0][table[1]] for table, _ in self._sources if table is not None)

    def held(self) -> list[Tensor]:
        """The parameters and buffers that what a call makes for backward depends on; none of what a unit gathers."""
        statistics = self.program.statistics
        return [
            _GATHERED if name in self._gathered else table[0][table[1]]
            for number, (table, name) in enumerate(self._sources)
            if table is not None and number not in statistics
        ]

    def look_at(self, gradients: Sequence[Tensor]) -> None:
        """Gradients of what a call returned have come."""
        program = self.program
        for number, (_, stride) in zip(program.captured.tangents, program.layouts, strict=True):
            self.lay_otherwise = self.lay_otherwise or gradients[number].stride() != stride

    def look_at_copies(self, made: Sequence[Tensor | None]) -> None:
        """Backward has made these gradients; until autograd has taken the last, all of them are alive."""
        sources = [self._sources[number][0] for number, _ in self.program.contributions]
        pairs = [(t[0][t[1]], one) for t, one in zip(sources, made, strict=True) if t is not None and one is not None]
        self.copied_gradient_bytes = max(self.copied_gradient_bytes, copied_gradient_bytes(pairs))

    def write(self, values: Sequence[Tensor]) -> None:
        """Put the new contents into the buffers that the forward changes."""
        for (table, name, is_uncounted), value in zip(self._written, values, strict=True):
            buffer = table[name]
            # As the kernels of norms write theirs: a forward before this one may have saved them.
            with torch.autograd._unsafe_preserve_version_counter(buffer) if is_uncounted else nullcontext():
                buffer.copy_(value)

    def _seen(self, run: Callable[[], Any]) -> Any:
        """Run something in the place of the module's forward, as those see it who look at its calls."""
        return WATCHERS[-1](self.module, run) if WATCHERS else run()

    def _inputs(self, args: Any, kwargs: Any) -> list[Tensor]:
        arguments = tensors_in((args, kwargs))
        return [
            arguments[key] if table is None else table[0][table[1]]  # type: ignore[index]
            for table, key in self._sources
        ]

    def _repeated(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The inputs, each as often as it has contributions to its gradient, which autograd adds up one by one.

        What gets none is no input for autograd, which would call hooks of parameters without a gradient.
        """
        inputs = self._inputs(args, kwargs)
        repeated = [
            inputs[number] if made is not None or not inputs[number].requires_grad else inputs[number].detach()
            for number, made in self.program.contributions
        ]
        if self.in_order:
            # Autograd hands gradients on in the order in which nodes were made, the last first.
            for place in self.program.of_parameters_last_first:
                if repeated[place].requires_grad:
                    repeated[place] = repeated[place].view_as(repeated[place])
        return repeated

    def _returned(self, made: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        return with_tensors(self.program.captured.returned, self._with_passed_on(made, args, kwargs))

    def _with_passed_on(self, made: Sequence[Tensor], args: Any, kwargs: Any) -> list[Tensor]:
        """All tensors of the output, of which the call makes these, and returns the others as it was given them."""
        if len(made) == len(self.program.captured.passed_on):
            return list(made)
        arguments, own = tensors_in((args, kwargs)), iter(made)
        return [next(own) if n is None else arguments[n] for n in self.program.captured.passed_on]


def _table_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The table of parameters or buffers that has the tensor of this name, and its name there."""
    owner, leaf = _owner_of(module, name), name.rpartition(".")[2]
    return (owner._parameters if leaf in owner._parameters else owner._buffers), leaf


def _owner_of(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


class _Call(torch.autograd.Function):
    """One call: what the forward's program hands over is what autograd saves."""

    # What is saved and what comes in go after their last use in the backward's program.
    clear_saved_tensors_on_access = boxed_grads_call = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, bound: BoundProgram, batch: BatchCopies | None, checked: bool, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        program = bound.program
        with torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            made = program.forward_code([inputs[place] for place in program.places])
        returned = program.captured.graph.forward_outputs
        handed = list(made[returned:])
        for (place, _), viewed in zip(program.parameters, program.viewed, strict=True):
            handed[place] = _as_eager_saves(handed[place], viewed)
        ctx.lay = [handed[program.parameters[k][0]].untyped_storage()._cdata for k in program.both]
        ctx.read_again = ReadAgain(program.read_again, handed, batch, checked=checked) if program.read_again else None
        ctx.save_for_backward(*handed)
        ctx.bound, ctx.saved, ctx.batch = bound, None, batch
        ctx.flags = flags_now() if program.runs_again else None
        ctx.device_type, ctx.casts = inputs[0].device.type, torch.is_autocast_enabled(inputs[0].device.type)
        return _outputs_of(ctx, bound, made[:returned])

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        _check_backward(ctx)
        gradients = _unboxed(given)
        if ctx.batch is not None:
            ctx.batch.backward_begun = True
        bound: BoundProgram = ctx.bound
        program = bound.program
        saved = list(_saved_by(ctx, program) if ctx.saved is None else ctx.saved)
        keeps_graph = _get_current_graph_task_keep_graph()
        if keeps_graph:
            ctx.saved = list(saved)
        if ctx.read_again is not None:
            ctx.read_again.put_into(saved)
            ctx.read_again = ctx.read_again if keeps_graph else None
        _check_places([saved[program.parameters[k][0]] for k in program.both], ctx.lay)
        bound.look_at(gradients)
        watched = program.captured.tangents if bound.watches_gradients else ()
        taken = [StorageWeakRef(gradients[number].untyped_storage()) for number in watched]
        made = program.gradients(saved, gradients, ctx.flags)
        bound.gradients_held = bound.gradients_held or not all(storage.expired() for storage in taken)
        if bound.watches_gradients:
            bound.look_at_copies(made)
        return (None, None, None, *made)


class _DroppedCall(torch.autograd.Function):
    """One call that saves nothing: in backward the forward's program has run once more."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, bound: BoundProgram, saved: ProgramPlaceholder, *inputs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        program = bound.program
        # Autograd sees to it that they stay, and hooks around the model see them.
        parameters = [inputs[program.places[number]] for _, number in program.parameters]
        ctx.save_for_backward(*map(_as_eager_saves, parameters, program.viewed))
        ctx.bound, ctx.saved = bound, saved
        ctx.flags = flags_now() if program.runs_again else None
        ctx.device_type, ctx.casts = inputs[0].device.type, torch.is_autocast_enabled(inputs[0].device.type)
        ctx.lay = [parameters[k].untyped_storage()._cdata for k in program.both]
        with torch._C._DisableAutocast(), torch._C.DisableTorchFunction():
            made = program.outputs_code([inputs[place] for place in program.places])
        return _outputs_of(ctx, bound, made)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        _check_backward(ctx)
        gradients = _unboxed(given)
        ctx.bound.look_at(gradients)
        program, saved = ctx.saved.taken(again=_get_current_graph_task_keep_graph())
        parameters = ctx.saved_tensors
        _check_places([parameters[k] for k in program.both], ctx.lay)
        for (place, _), parameter in zip(program.parameters, parameters, strict=True):
            saved[place] = parameter
        return None, None, *program.gradients(saved, gradients, ctx.flags)


def _unboxed(given: tuple[Any, ...]) -> list[Tensor]:
    """The gradients that backward is given, in a list whose owner lets go of them as it is emptied.

    Before release 2.13 torch knows no such list: gradients come one by one, and stay until backward ends.
    """
    return given[0] if _BOXED else list(given)


def _saved_by(ctx: Any, program: CallProgram) -> tuple[Tensor, ...]:
    """Returns what autograd has saved; says in words where recomputed ops read something that was changed."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if not program.read_again or "inplace" not in str(error):
            raise
        raise RerunError(CHANGED.format("a tensor")) from error


def _check_places(parameters: Sequence[Tensor], lay: Sequence[int]) -> None:
    """Refuse parameters whose memory is another than in forward, where both that and the new one would be needed."""
    for parameter, before in zip(parameters, lay, strict=True):
        if parameter.untyped_storage()._cdata != before:
            raise RerunError(
                f"the .data of a parameter of shape {tuple(parameter.shape)} was replaced between the forward and the "
                "backward of a stage that is recomputed in part; replace it after backward, or profile with menus=False"
            )


def _as_eager_saves(parameter: Tensor, viewed: bool) -> Tensor:
    """The parameter, or a view of it: that holds its memory of now, where ``.data`` is replaced before backward."""
    return parameter.view_as(parameter) if viewed else parameter


def _outputs_of(ctx: Any, bound: BoundProgram, made: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the call's outputs among what the forward's program returned first; buffers are written."""
    captured = bound.program.captured
    count = len(captured.written)
    bound.write(made[:count])
    outputs = tuple(made[count:])
    ctx.mark_non_differentiable(*(t for t, takes in zip(outputs, captured.differentiable, strict=True) if not takes))
    return outputs


def _check_backward(ctx: Any) -> None:
    """Refuse what the program of a backward was not traced for."""
    if torch.is_grad_enabled():
        raise CaptureError(
            "backward runs with create_graph=True, which the profiled step did not ask for; profile the step as it is, "
            "or profile with menus=False"
        )
    if torch.is_autocast_enabled(ctx.device_type) and not ctx.casts:
        raise CaptureError(
            "backward runs inside autocast, and this stage's forward ran outside of autocast; leave autocast before "
            "backward, as torch's documentation advises, or profile with menus=False"
        )


def _as_traced(gradient: Tensor, size: torch.Size, stride: Sequence[int]) -> Tensor:
    """A gradient that lies as the traced one did."""
    if gradient.stride() == tuple(stride):
        return gradient
    if 0 in stride:
        return gradient.contiguous()
    return torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


CHANGED = (
    "{} that recomputed ops read was changed in place since; call backward before anything writes to it, or profile "
    "with menus=False"
)


class InputRead(NamedTuple):
    """An input of a call that recomputed ops read.

    Attributes:
        place: among what forward hands over.
        of_module: whether it is a parameter or a buffer, not an argument.
        alone: no op of backward itself reads it.
    """

    place: int
    of_module: bool
    alone: bool


def inputs_read_again(backward: fx.GraphModule, of_module: dict[str, bool]) -> list[InputRead]:
    """The inputs of a program of a backward that recomputed ops read.

    Args:
        backward: the program.
        of_module: whether inputs of the call, by their names, are parameters or buffers.
    """
    found: list[InputRead] = []
    for place, node in enumerate(backward.graph.find_nodes(op="placeholder")):
        if node.name in of_module:
            readers = _readers(node)
            again = [AGAIN in reader.meta for reader in readers]
            if any(again):
                found.append(InputRead(place, of_module[node.name], all(again)))
    return found


def _readers(node: fx.Node) -> list[fx.Node]:
    """Returns what reads a value, by views of it as well."""
    readers: list[fx.Node] = []
    for user in node.users:
        readers += _readers(user) if is_view(user) and AGAIN not in user.meta else [user]
    return readers


class ReadAgain:
    """The inputs that recomputed ops read, as they were in forward.

    Args:
        reads: the inputs.
        handed: all that forward hands over; parts of the batch that only recomputed ops read are taken out.
        batch: the step's batch; None where it is not known.
        checked: whether backward compares some values of parameters with those of forward.
    """

    __slots__ = ("_copies", "_values")

    def __init__(
        self, reads: Sequence[InputRead], handed: list[Any], batch: BatchCopies | None, *, checked: bool
    ) -> None:
        self._copies: list[tuple[int, HeldTensor]] = []
        self._values: list[tuple[int, bool, Values]] = []
        for place, of_module, alone in reads:
            tensor = handed[place]
            if of_module:
                if checked:
                    self._values.append((place, True, some_values_of(tensor)))
            elif batch is not None and batch.holds(tensor):
                held = HeldTensor(tensor.detach())
                held.values, held.copy = some_values_of(tensor), batch.copy_of(tensor) if alone else None
                if held.copy is None:
                    self._values.append((place, False, held.values))
                else:
                    self._copies.append((place, held))
                    handed[place] = None  # Autograd would refuse it once it was changed.

    def put_into(self, saved: list[Any]) -> None:
        """Put what was taken out back into what was handed over.

        Raises:
            RerunError: something that is read again was changed.
        """
        for place, held in self._copies:
            saved[place] = held.as_before()
        for place, of_module, values in self._values:
            if some_values_of(saved[place]) != values:
                shape = tuple(saved[place].shape)
                raise RerunError(CHANGED.format(f"{'a parameter' if of_module else 'an input'} of shape {shape}"))
