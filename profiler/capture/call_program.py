"""A captured call that runs as two programs: one function for autograd, generated code below it, no mode, no tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph

from profiler.capture.captured_call import CapturedCall
from profiler.capture.joint_graph import CaptureError
from profiler.capture.programs import StepOrder, programs_of
from profiler.capture.random_ops import random_state
from profiler.recomputation.module_rerun import CallState
from profiler.tensors.tensor_trees import device_of, tensors_in, with_tensors, without_tensors
from profiler.workload.compiled_forwards import Forward

_Code = Callable[[list[Any]], Sequence[Any]]


class CallProgram:
    """Runs calls that are alike, in the order of runs that was chosen for them.

    Args:
        captured: one of the calls.
        order: of the runs of its ops.
    """

    def __init__(self, captured: CapturedCall, order: StepOrder) -> None:
        self.captured = captured
        forward, backward = programs_of(captured.graph, order)
        self.forward_code: _Code = forward.forward
        self.backward_code: _Code = backward.forward
        tangents = [node.meta["val"] for node in captured.graph.tangents]
        self.layouts = [(tangent.size(), tangent.stride()) for tangent in tangents]

    def bound(self, module: nn.Module) -> BoundProgram:
        """The program for a module: where its parameters and buffers are looked up at every call."""
        return BoundProgram(self, module)


class BoundProgram:
    """Calls a program with the parameters and buffers of one module.

    Args:
        program: for modules like this one.
        module: whose parameters and buffers are read.
    """

    def __init__(self, program: CallProgram, module: nn.Module) -> None:
        self.program = program
        tables = [None if isinstance(each, int) else _table_of(module, each) for each in program.captured.sources]
        self._sources = [*zip(tables, program.captured.sources, strict=True)]
        self._written = [_table_of(module, name) for name in program.captured.written]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward returns for these arguments."""
        arguments = tensors_in((args, kwargs))
        inputs = [
            arguments[key] if table is None else table[0][table[1]]  # type: ignore[index]
            for table, key in self._sources
        ]
        outputs = _Call.apply(self, *inputs)
        return with_tensors(self.program.captured.returned, outputs)

    def write(self, values: Sequence[Tensor]) -> None:
        """Put the new contents into the buffers that the forward changes."""
        for (table, name), value in zip(self._written, values, strict=True):
            table[name].copy_(value)


def _table_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The table of parameters or buffers that has the tensor of this name, and its name there."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    return (owner._parameters if leaf in owner._parameters else owner._buffers), leaf


class _Call(torch.autograd.Function):
    """One call: what the forward's program hands over is what autograd saves."""

    # What is saved and what comes in go after their last use in the backward's program.
    clear_saved_tensors_on_access = boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, bound: BoundProgram, *inputs: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        program = bound.program
        captured = program.captured
        made = program.forward_code(list(inputs))
        count = len(captured.written)
        returned = captured.graph.forward_outputs
        bound.write(made[:count])
        outputs = tuple(made[count:returned])
        ctx.save_for_backward(*made[returned:])
        ctx.program = program
        ctx.mark_non_differentiable(
            *(t for t, takes in zip(outputs, captured.differentiable, strict=True) if not takes)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if _get_current_graph_task_keep_graph():
            raise CaptureError("backward: expected one that lets go of what forward has saved, got retain_graph=True")
        program: CallProgram = ctx.program
        captured = program.captured
        arguments = list(ctx.saved_tensors)
        for number, (size, stride) in zip(captured.tangents, program.layouts, strict=True):
            arguments.append(_as_traced(gradients[number], size, stride))
        gradients.clear()
        made = program.backward_code(arguments)
        return (None, *(None if number is None else made[number] for number in captured.gradients))


def difference(bound: BoundProgram, module: nn.Module, forward: Forward, args: Any, kwargs: Any) -> str:
    """Names the first thing in which a program differs from the module's own call, bit for bit; empty if nothing does.

    The module's call runs first, and its effects stay. The program then runs from the same starting state, and its
    effects are undone.

    Args:
        bound: the program.
        module, forward, args, kwargs: the call.
    """
    state = CallState(module, device_of((args, kwargs)), draws_random=True)
    expected = _observed(forward, module, args, kwargs)
    with state.reinstated(), torch.enable_grad():
        got = _observed(bound, module, args, kwargs)
    if expected.keys() != got.keys():
        return "the number of its outputs"
    return next((what for what, value in expected.items() if not _same_bits(value, got[what])), "")


def _observed(call: Forward, module: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor | None]:
    """Outputs and gradients of a call, and what is in buffers and in the generator after it."""
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors_in((args, kwargs))]
    # Modules may write to what they are given: not to a leaf.
    given, named = with_tensors(without_tensors((args, kwargs)), [t * 1 if t.requires_grad else t for t in leaves])
    output = call(*given, **named)
    drawn = random_state(device_of(leaves))
    outputs = tensors_in(output)
    trained = [tensor for tensor in outputs if tensor.requires_grad]
    sources = {f"the gradient of argument {k}": leaf for k, leaf in enumerate(leaves) if leaf.requires_grad}
    sources |= {f"the gradient of {name!r}": p for name, p in module.named_parameters() if p.requires_grad}
    numbers = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape) for t in trained]
    gradients = torch.autograd.grad(trained, [*sources.values()], numbers, allow_unused=True)
    seen: dict[str, Tensor | None] = {f"output {k}": tensor.detach() for k, tensor in enumerate(outputs)}
    seen |= zip(sources, gradients, strict=True)
    seen |= {f"buffer {name!r}": buffer.detach().clone() for name, buffer in module.named_buffers()}
    return seen | {"the random numbers that it draws": drawn}


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    bits, others = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(bits, others)


def _as_traced(gradient: Tensor, size: torch.Size, stride: Sequence[int]) -> Tensor:
    """A gradient that lies as the traced one did."""
    if gradient.stride() == tuple(stride):
        return gradient
    return torch.empty_strided(size, stride, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
