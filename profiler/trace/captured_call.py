"""One call of a module, captured as forward and backward in one graph of aten ops.

AOTAutograd traces the module's own Python with fake tensors, without Dynamo: nothing is computed, and what the call
changes in its modules meanwhile is put back. Calls that are alike (blocks of one kind) share a capture, since it names
parameters and buffers and does not hold them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from profiler.recomputation.module_pieces import ONE_SUM
from profiler.recomputation.module_rerun import CallState
from profiler.step_graph import StepGraph
from profiler.trace.dropout_masks import split_dropout
from profiler.trace.joint_graph import MODULE, CaptureError, JointGraph, has_own_generator, storages_of
from profiler.workload.compiled_forwards import Forward
from profiler.workload.plain_objects import MOST_ITEMS, Change, copied, refill
from profiler.workload.reachable import globals_of_forwards
from profiler.workload.tensor_trees import device_of, tensors_in, with_tensors, without_tensors


class GradientLayouts(NamedTuple):
    """The layouts of the gradients of a call's outputs that take one.

    Attributes:
        strides: the strides of each; empty where they are not known: it is taken to be contiguous.
        same_sizes: whether they come from a call with the sizes of this one; else the order of the dimensions counts.
    """

    strides: tuple[tuple[int, ...], ...] = ()
    same_sizes: bool = True

    def of(self, number: int, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The strides of a gradient of this shape; None where they are not known."""
        strides = self.strides[number] if number < len(self.strides) else ()
        if not strides or len(strides) != len(shape):
            return None
        if self.same_sizes:
            return strides
        made, step = [0] * len(shape), 1
        for place in sorted(range(len(shape)), key=lambda place: (strides[place], -place)):
            if strides[place]:
                made[place], step = step, step * shape[place]
        return tuple(made)


class UnsettledError(CaptureError):
    """A call that sets attributes of its modules: a first one often does, and those after it need not.

    Attributes:
        changes: the changes of plain attributes; None where there are others.
    """

    def __init__(self, message: str, changes: Sequence[Change] | None) -> None:
        super().__init__(message)
        self.changes = changes


CONTIGUOUS = GradientLayouts()
_INSIDE = "module."
_MOST_CONSTANT_BYTES = 4096
_NOTHING_TRAINED = "it computes nothing to train"
_FRESH = ("non_alias", "unsafe_view_alias")  # kinds of outputs with memory of their own


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """Forward and backward of a call of a module, with the meaning of the graph's inputs and outputs.

    Attributes:
        graph: forward and backward in one.
        sources: the source of each input of the forward: the name of a parameter or buffer of the module, or the number
            of a tensor in the call's arguments.
        returned: the call's output, with stand-ins for its tensors.
        passed_on: the number of the argument that each tensor in the output is; None where the call makes it.
        differentiable: whether each tensor that it makes for the output takes a gradient.
        tangents: the number among these of the tensor of each gradient that the backward takes.
        gradients: the outputs of the backward that add up to the gradient of each input of the forward, in this order:
            one for each use, since what other calls contribute may have to come before them in the sum.
        written: the names of buffers that get new contents as the forward ends, in the order of its first outputs.
        complete: the names of parameters in the order in which autograd completes their gradients.
    """

    graph: JointGraph
    sources: tuple[str | int, ...]
    returned: Any
    passed_on: tuple[int | None, ...]
    differentiable: tuple[bool, ...]
    tangents: tuple[int, ...]
    gradients: tuple[tuple[int, ...], ...]
    written: tuple[str, ...]
    complete: tuple[str, ...] = ()

    def with_arguments(self, step: StepGraph) -> StepGraph:
        """The dataflow of the graph, with the arguments of the call that each op reads."""
        numbers = {
            storage: source
            for node, source in zip(self.graph.inputs, self.sources, strict=True)
            if isinstance(source, int)
            for storage in storages_of(node)
        }
        read = {
            op.name: {numbers[s] for source in op.all_input_nodes for s in storages_of(source) if s in numbers}
            for op in self.graph.ops
        }
        return replace(step, ops=tuple(replace(op, arguments=tuple(sorted(read[op.name]))) for op in step.ops))


def capture_call(
    module: nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    gradients: GradientLayouts = CONTIGUOUS,
) -> CapturedCall:
    """Trace a call of a module.

    Args:
        module: the called module.
        forward: the module's own forward.
        args, kwargs: arguments of the call, with tensors as they come in training.
        gradients: the layouts of the gradients of its outputs.

    Raises:
        CaptureError: it is no single graph of ops (Python looks at values, or an op has no fake tensors), computes
            nothing to train, or does or returns what a program could not.
    """
    # They load what torch.compile is made of.
    from torch._dynamo import config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    arguments = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors_in((args, kwargs))]
    flat = _FlatCall(module, forward, without_tensors((args, kwargs)))
    state = CallState(module, device_of((args, kwargs)), draws_random=True)
    containers = [(container, copied(container)) for container in _containers_in_globals(module)]
    # Modes that look at the ops of a step see none of tracing.
    with (
        _disable_current_modes(),
        state.reinstated(),
        torch.enable_grad(),
        _naming_modules(module),
        contextlib.ExitStack() as stack,
    ):
        stack.enter_context(_tangents_lying(gradients))
        hooks = stack.enter_context(_hooks_on_saved_tensors())
        # What the cache gives back has lost the size of its storage: aten.copy of a part makes one like the whole.
        stack.enter_context(config.patch(fake_tensor_cache_enabled=False))
        try:
            joint = aot_export_joint_with_descriptors(stack, flat, tuple(arguments))
        except Exception as error:  # The module's own code runs here, and torch's tracing.
            said = next(iter(str(error).strip().splitlines()), "")
            raise CaptureError(f"it is not traced as one graph of ops: {type(error).__name__}: {said}") from error
        if state.has_changed():
            raise UnsettledError(
                "it sets attributes of its modules, or draws numbers that are not torch's, which a program would not",
                state.plain_changes(),
            )
    if written := [container for container, before in containers if copied(container) != before]:
        for container, before in containers:
            refill(container, before)
        raise CaptureError(
            f"it changes a {type(written[0]).__name__} among the globals of its file, which a program would not"
        )
    if flat.changed_arguments:
        raise CaptureError("it adds to its arguments, or takes from them")
    if hooks:
        raise CaptureError(
            "it has hooks on saved tensors (torch.utils.checkpoint, save_on_cpu), which a program would not call"
        )
    outputs = joint._aot_state.fw_metadata.output_info
    if any(each.output_type.name not in _FRESH for each in outputs):
        raise CaptureError(
            "it returns a parameter, or a view of something, and not only tensors of its own or its arguments"
        )
    module_graph = joint.graph_module
    (output,) = module_graph.graph.find_nodes(op="output")
    described = output.meta["desc"]
    # Behind them comes a gradient for each input; of one that takes none nothing is described.
    kinds = [type(each).__name__ for each in described]
    forward_outputs = next((k for k, kind in enumerate(kinds) if kind in ("NoneType", "GradAOTOutput")), len(kinds))
    if forward_outputs == len(kinds):
        raise CaptureError(_NOTHING_TRAINED)
    _leave_statistics_out(module_graph.graph)
    split_dropout(module_graph.graph)
    graph = JointGraph(module_graph, forward_outputs)
    if any(map(has_own_generator, graph.ops)):
        raise CaptureError(
            "it draws from another generator than torch's own, which a program would neither make nor seed anew"
        )
    _hold_constants_uncounted(graph)
    described = [*described[:forward_outputs], *_split_sums(graph, described[forward_outputs:])]
    return _described(JointGraph(module_graph, forward_outputs), described, flat, outputs)


def _hold_constants_uncounted(graph: JointGraph) -> None:
    """Have tensors that the traced code makes of numbers (``torch.tensor(0.5)``) lie where no allocator counts them.

    The code makes them anew in every call; a program holds them from step to step, as it does its numbers.

    Raises:
        CaptureError: they are more than a few numbers.
    """
    for node in graph.constants:
        constant = getattr(graph.module, str(node.target))
        if constant.nbytes > _MOST_CONSTANT_BYTES:
            raise CaptureError(
                f"it makes a tensor of {constant.nbytes:,} bytes from numbers in its code, which a program would hold "
                "from step to step"
            )
        if constant.device.type == "cpu" and constant.nbytes:
            memory = torch.from_numpy(np.empty(constant.nbytes, np.uint8))
            setattr(graph.module, str(node.target), memory.view(constant.dtype).view(constant.shape).copy_(constant))
    for node in graph.module.graph.nodes:
        for fake in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(fake, FakeTensor):
                fake.constant = None  # What tracing knew the values of.


def _leave_statistics_out(graph: fx.Graph) -> None:
    """Have the backward of batch norms in training take no running statistics, which it does not read.

    They have other contents by then: handed over to backward, autograd would refuse them.
    """
    backward = torch.ops.aten.native_batch_norm_backward.default
    for node in graph.find_nodes(op="call_function", target=backward):
        grad, given, weight, _, _, mean, scale, training, *rest = node.args
        if training is True:
            node.args = (grad, given, weight, None, None, mean, scale, training, *rest)


@contextlib.contextmanager
def _tangents_lying(layouts: GradientLayouts) -> Iterator[None]:
    """Has AOTAutograd trace backward inside with gradients so laid out: kernels would add up in another order."""
    from torch._functorch._aot_autograd import collect_metadata_analysis as analysis

    usual, numbers = analysis.coerce_tangent_and_suggest_memory_format, itertools.count()

    def coerced(tangent: Tensor) -> Any:
        made, *more = usual(tangent)
        strides = layouts.of(next(numbers), tangent.shape)
        if strides is not None and isinstance(made, Tensor):
            made = made.new_empty_strided(made.size(), strides)
        return made, *more

    analysis.coerce_tangent_and_suggest_memory_format = coerced
    try:
        yield
    finally:
        analysis.coerce_tangent_and_suggest_memory_format = usual


@contextlib.contextmanager
def _hooks_on_saved_tensors() -> Iterator[list[Any]]:
    """The hooks on saved tensors that are set inside. Tracing calls them, and what they do is in no graph."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    usual, entered = hooks.__enter__, list[Any]()

    def enter(self: Any) -> None:
        entered.append(self)
        usual(self)

    hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        hooks.__enter__ = usual  # type: ignore[method-assign]


@contextlib.contextmanager
def _naming_modules(module: nn.Module) -> Iterator[None]:
    """Has tracing inside note for each op which of the modules inside this one calls it."""
    names = {inner: name for name, inner in module.named_modules() if name}
    open_calls: list[contextlib.AbstractContextManager[Any]] = []

    def begins(inner: nn.Module, _: Any) -> None:
        if inner in names:
            open_calls.append(annotate({MODULE: names[inner]}))
            open_calls[-1].__enter__()

    def ends(inner: nn.Module, *_: Any) -> None:
        if inner in names:
            open_calls.pop().__exit__(None, None, None)

    hooks = register_module_forward_pre_hook(begins), register_module_forward_hook(ends, always_call=True)
    try:
        with preserve_node_meta():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        while open_calls:
            open_calls.pop().__exit__(None, None, None)


def _containers_in_globals(module: nn.Module) -> list[Any]:
    """Lists, dicts and sets that the forwards of a module and those inside it name in their files, each once."""
    named = (value for _, _, value in globals_of_forwards(module) if type(value) in (list, dict, set))
    return [*{id(each): each for each in named if len(each) <= MOST_ITEMS}.values()]


class _FlatCall(nn.Module):
    """A call that takes a list of tensors and returns one, without those that it takes."""

    def __init__(self, module: nn.Module, forward: Forward, arguments: Any) -> None:
        super().__init__()
        self.module, self.returned, self.changed_arguments = module, None, False
        self.passed_on: tuple[int | None, ...] = ()
        self.complete: list[str] = []
        self._forward: Callable[..., Any] = forward
        self._arguments = arguments

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = with_tensors(self._arguments, tensors)
        self.complete.clear()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:  # What tracing has put in its place.
                parameter.register_hook(functools.partial(self._completed, name))
        output = self._forward(*args, **kwargs)
        left = tensors_in((args, kwargs))
        self.changed_arguments = len(left) != len(tensors) or any(map(operator.is_not, left, tensors))
        self.returned, made = without_tensors(output), tensors_in(output)
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.passed_on = tuple(numbers.get(id(tensor)) for tensor in made)
        return tuple(tensor for tensor in made if id(tensor) not in numbers)

    def _completed(self, name: str, _: Tensor) -> None:
        self.complete.append(name)


def _split_sums(graph: JointGraph, described: Sequence[Any]) -> list[Any]:
    """Has the graph return the contribution of each use of an input to its gradient; returns the new outputs."""
    inputs = {node.meta["desc"]: node for node in graph.inputs}
    (output,) = graph.module.graph.find_nodes(op="output")
    returned, split = list(graph.outputs[: graph.forward_outputs]), list[Any]()
    for gradient, each in zip(graph.outputs[graph.forward_outputs :], described, strict=True):
        uses = 0 if each is None else _uses(inputs[each.grad_of], graph)
        parts = [gradient]
        while len(parts) < uses and _is_sum(parts[0]):
            parts[:1] = parts[0].args
        returned += parts
        split += [each] * len(parts)
    output.args = (type(output.args[0])(returned),)
    output.meta["desc"] = [*output.meta["desc"][: graph.forward_outputs], *split]
    graph.module.graph.eliminate_dead_code(lambda node: not _is_sum(node))
    graph.module.recompile()
    return split


def _uses(node: fx.Node, graph: JointGraph) -> int:
    """Returns the number of times that ops of the forward take an input."""
    return sum([*pytree.tree_leaves((op.args, op.kwargs))].count(node) for op in node.users if op in graph.forward_ops)


def _is_sum(node: Any) -> bool:
    """Whether a node only adds two tensors of the layout of the sum."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return False
    if ONE_SUM in node.meta.get("custom", ()):
        return False
    shape = node.meta["val"].shape
    parts = [each.meta["val"] if isinstance(each, fx.Node) else None for each in node.args]
    return all(isinstance(each, Tensor) and each.shape == shape for each in parts) and len(node.users) <= 1


def _described(graph: JointGraph, described: Any, flat: _FlatCall, outputs: Any) -> CapturedCall:
    from torch._functorch._aot_autograd.descriptors import (
        BufferAOTInput,
        InputMutationAOTOutput,
        PlainAOTOutput,
        TangentAOTInput,
    )

    sources = tuple(_source(node.meta["desc"]) for node in graph.inputs)
    gradients: dict[Any, list[int]] = {}
    made = graph.outputs[graph.forward_outputs :]
    for number, (each, node) in enumerate(zip(described[graph.forward_outputs :], made, strict=True)):
        if each is not None and node is not None:
            gradients.setdefault(each.grad_of, []).append(number)
    written: list[str] = []
    for each in described[: graph.forward_outputs]:
        if isinstance(each, InputMutationAOTOutput):
            if not isinstance(each.mutated_input, BufferAOTInput):
                raise CaptureError("it changes its arguments")
            written.append(_source(each.mutated_input))  # type: ignore[arg-type]
        elif not isinstance(each, PlainAOTOutput):
            raise CaptureError(f"it returns a {type(each).__name__}, which is no tensor of its own")
    tangents: list[int] = []
    for node in graph.tangents:
        of = node.meta["desc"].output if isinstance(node.meta["desc"], TangentAOTInput) else None
        if not isinstance(of, PlainAOTOutput):
            raise CaptureError("its backward takes gradients of other tensors than its outputs")
        tangents.append(of.idx)
    if not tangents:
        raise CaptureError(_NOTHING_TRAINED)
    return CapturedCall(
        graph=graph,
        sources=sources,
        returned=flat.returned,
        passed_on=flat.passed_on,
        differentiable=tuple(each.requires_grad for each in outputs),
        tangents=tuple(tangents),
        gradients=tuple(tuple(gradients.get(node.meta["desc"], ())) for node in graph.inputs),
        written=tuple(written),
        complete=tuple(flat.complete),
    )


def _source(described: Any) -> str | int:
    from torch._functorch._aot_autograd.descriptors import BufferAOTInput, ParamAOTInput, PlainAOTInput

    if isinstance(described, PlainAOTInput):
        return described.idx
    if isinstance(described, (ParamAOTInput, BufferAOTInput)):
        return described.target.removeprefix(_INSIDE)
    raise CaptureError(f"it reads a {type(described).__name__}, which is no parameter, buffer or argument")
