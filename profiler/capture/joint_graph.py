"""Forward and backward of a workload's model as one graph of aten ops: Dynamo in front, AOTAutograd behind.

Nothing is computed: Dynamo and AOTAutograd trace with fake tensors, and the step ends where the traced forward would
run.
"""

from __future__ import annotations

import logging
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.utils import _pytree as pytree

from profiler.capture.detached_outputs import without_gradients
from profiler.capture.traced_types import correct_types
from profiler.workload.compiled_forwards import Forward
from profiler.workload.forward_patches import ForwardPatches
from profiler.workload.model_caches import ModelCaches
from profiler.workload.snapshot import preserved
from profiler.workload.steps import causes_of
from profiler.workload.workload import Workload

_TORCH = str(Path(torch.__file__).parent)
_FAILED = re.compile(r"fake tensor call\n.*: got (\w+\(.*\))$", re.M)  # An op that fails on the arguments that it got.
REMEDY = "a plan of stages works there: profile without graph=True"


class CaptureError(ValueError):
    """A model whose step is no single graph of ops; the message names where it breaks, and what to do."""


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of one call of a model, traced together.

    Attributes:
        module: its inputs are what the forward reads (parameters, buffers, the batch) and, named ``tangents_...``,
            the gradients of what it returns; its nodes are aten ops. What is written into buffers is returned.
        forward_outputs: how many of its outputs the forward returns; the others are gradients of its inputs.
    """

    module: fx.GraphModule
    forward_outputs: int

    def __post_init__(self) -> None:
        correct_types(self.module.graph)

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        """Nodes, and constants, that it returns: first the forward's, then the gradients."""
        (node,) = self.module.graph.find_nodes(op="output")
        return tuple(node.args[0])

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        """Inputs of the forward."""
        return tuple(node for node in self._placeholders() if not _is_tangent(node))

    @cached_property
    def tangents(self) -> tuple[fx.Node, ...]:
        """Inputs that only the backward has."""
        return tuple(filter(_is_tangent, self._placeholders()))

    @cached_property
    def constants(self) -> tuple[fx.Node, ...]:
        """Tensors that the forward's code holds."""
        return tuple(self.module.graph.find_nodes(op="get_attr"))

    @cached_property
    def changed_inputs(self) -> frozenset[fx.Node]:
        """Inputs (buffers) that get new contents as the forward ends."""
        changed = {each.mutated_input for _, each in self._described() if isinstance(each, InputMutationAOTOutput)}
        return frozenset(each for each in self.inputs if each.meta["desc"] in changed)

    @cached_property
    def written(self) -> tuple[Any, ...]:
        """Outputs that are written into buffers as the forward ends."""
        return tuple(node for node, described in self._described() if isinstance(described, InputMutationAOTOutput))

    @cached_property
    def returned(self) -> tuple[Any, ...]:
        """The other outputs of the forward."""
        return tuple(node for node, described in self._described() if not isinstance(described, InputMutationAOTOutput))

    def _described(self) -> list[tuple[Any, Any]]:
        (node,) = self.module.graph.find_nodes(op="output")
        return [*zip(self.outputs, node.meta["desc"], strict=True)][: self.forward_outputs]

    @cached_property
    def forward_ops(self) -> frozenset[fx.Node]:
        """Calls that the forward's outputs need."""
        needed = _needed_by(self.outputs[: self.forward_outputs])
        return frozenset(node for node in needed if node.op == "call_function")

    @cached_property
    def ops(self) -> tuple[fx.Node, ...]:
        """Calls that an output needs, in order: those of the forward first."""
        needed = _needed_by(self.outputs)
        calls = [node for node in self.module.graph.nodes if node.op == "call_function" and node in needed]
        return tuple(sorted(calls, key=lambda call: call not in self.forward_ops))

    @cached_property
    def makers(self) -> dict[int, fx.Node]:
        """By storage the op that makes it, in the order of ops; what model, batch and loss bring is left out."""
        brought = {s for node in (*self.inputs, *self.constants, *self.tangents) for s in storages_of(node)}
        makers: dict[int, fx.Node] = {}
        for op in self.ops:
            for storage in storages_of(op):
                if storage not in brought:
                    makers.setdefault(storage, op)
        return makers

    def _placeholders(self) -> list[fx.Node]:
        return self.module.graph.find_nodes(op="placeholder")


def _is_tangent(node: fx.Node) -> bool:
    return node.name.startswith("tangents")


def _needed_by(outputs: tuple[Any, ...]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    waiting = [output for output in outputs if isinstance(output, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def module_of(op: fx.Node) -> str:
    """Name of the module whose forward calls an op, or whose forward it is the backward of; empty where unknown."""
    if (named := op.meta.get("custom")) is not None and MODULE in named:
        return named[MODULE]
    stack = op.meta.get("nn_module_stack") or op.meta.get("fwd_nn_module_stack") or {}
    names = [name for name, _ in stack.values()]
    return names[-1].rpartition("__self__")[2].removeprefix(".") if names else ""


def storages_of(node: Any) -> dict[int, int]:
    """Numbers and bytes of the storages under what a node makes; of a constant none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    storages = [leaf.untyped_storage() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


MODULE = "planner_module"  # in what tracing notes of an op: the module that calls it


class _Captured(Exception):
    """Ends the step whose graph has been traced."""


def capture(workload: Workload) -> JointGraph:
    """Trace the workload's forward and backward.

    Raises:
        CaptureError: the forward is no single graph, or needs no backward.
    """
    with preserved(workload), ModelCaches(workload.model).off():
        return traced(workload.model, workload.step)


def traced(model: nn.Module, step: Callable[[], object]) -> JointGraph:
    """Trace a model's forward and backward where it is first called; tensors may be fake.

    Args:
        model: in training mode.
        step: calls it; ended by the first call.

    Raises:
        CaptureError: the forward is no single graph, or needs no backward.
    """
    graphs: list[JointGraph] = []

    def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        graphs.append(JointGraph(module, num_fwd_outputs))
        raise _Captured

    backend = aot_autograd(fw_compiler=never_compiled, partition_fn=partition)
    with capturing(model, backend):
        try:
            step()
        except Exception:  # torch puts what ends the step into errors of its own.
            if not graphs:
                raise
    if not graphs:
        raise CaptureError(
            f"profile: expected a forward whose outputs need gradients, got one that computes none; {REMEDY}"
        )
    return graphs[0]


@contextmanager
def capturing(
    model: nn.Module, backend: Any, unused: Collection[int] = (), wanted: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Within it the model's forward is compiled by a backend, whole, in training; in evaluation it is as it was.

    Args:
        model: to compile.
        backend: of torch.compile.
        unused: places of outputs that need no gradient.
        wanted: whether the compiled forward is, at each call; else it is as it was.

    Raises:
        CaptureError: a step within it ends since the forward is no single graph.
    """
    plain = model.forward
    compiled = compiled_whole(without_gradients(plain, unused), backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        trains = model.training and torch.is_grad_enabled()
        return (compiled if trains and wanted() else plain)(*args, **kwargs)

    patches = ForwardPatches()
    patches.wrap(model, lambda _: run)
    try:
        yield
    except Exception as error:
        raise_as_said(error, CaptureError)
        raise
    finally:
        patches.remove()
        PhiloxStateTracker.reset()  # As tracing leaves it, it holds the mode of fake tensors, and by it the graph.


def compiled_whole(forward: Forward, backend: Any) -> Forward:
    """A forward compiled by a backend as one graph, of the shapes that it is called with."""

    def call(*args: Any, **kwargs: Any) -> Any:  # Dynamo begins in no frame of torch's own: Sequential.forward is one.
        return forward(*args, **kwargs)

    # Made once, with the functions of torch as they are then: a step of the user's own has torch.autograd.grad watched.
    TorchInGraphFunctionVariable._get_handlers()
    # Dynamo counts what it compiles of a piece of code, and gives up after eight: each model has its own.
    call.__code__ = call.__code__.replace()
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=False)
    patched = {
        "ignore_logging_functions": _Functions({*torch._dynamo.config.ignore_logging_functions, *_log_calls()}),
        # What the cache gives back has lost the size of its storage: aten.copy of a part makes one like the whole.
        "fake_tensor_cache_enabled": False,
        "skip_nnmodule_hook_guards": False,  # A hook that comes after the first step would never run.
    }

    settings = torch._dynamo.config.patch(patched)  # One for all calls: each keeps a context variable for good.

    def run(*args: Any, **kwargs: Any) -> Any:
        with settings:
            return compiled(*args, **kwargs)

    weakref.finalize(run, _forget_compiled, call.__code__, backend).atexit = False
    return run


def _forget_compiled(code: types.CodeType, backend: Any) -> None:
    """Dynamo keeps what it compiled, and by it the graph, in tables of code and of backends, which nothing clears."""
    torch._dynamo.reset_code(code)
    for key, each in list(cached_backends.items()):
        if backend in (each, getattr(each, "compiler_fn", None)):
            del cached_backends[key]


class _Functions(dict[Any, Any]):
    """Functions that JSON takes for an empty object.

    torch 2.11 writes this setting as JSON beside the seconds of each compilation, sorted, and logs an error where it
    cannot; newer ones leave it out.
    """

    def __init__(self, functions: Iterable[Any]) -> None:
        super().__init__()
        self._functions = frozenset(functions)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._functions)

    def __contains__(self, function: object) -> bool:
        return function in self._functions

    def __deepcopy__(self, memo: dict[int, Any]) -> _Functions:
        return self


def _log_calls() -> list[Any]:
    """Methods of loggers, also those that libraries add: a line in a log is no reason for a break."""
    found = vars(logging.Logger).items()
    return [method for name, method in found if name.startswith(("debug", "info", "warn", "error", "log", "exception"))]


def never_compiled(module: fx.GraphModule, _: Any) -> Any:
    """A compiler for forwards that compute nothing to train; it raises CaptureError."""
    raise CaptureError(
        "profile: expected a forward that computes something to train, got one without; unfreeze what is to be trained"
    )


def raise_as_said(error: Exception, ours: type[Exception]) -> None:
    """Raise, instead of an error of compiling, ours that it came from, or where the graph breaks, if it is either.

    Args:
        error: that a call of a compiled forward raised.
        ours: what a backend raises.
    """
    causes = [*causes_of(error)]
    for cause in causes:
        if isinstance(cause, (CaptureError, ours)):
            raise cause
    torchs = next((cause for cause in causes if isinstance(cause, TorchDynamoException)), None)
    if torchs is None or any(isinstance(cause, BackendCompilerFailed) for cause in causes):
        return
    said = [line.strip() for line in str(torchs).strip().splitlines()]
    where = _line_of_forward(said)
    if failed := _FAILED.search(str(torchs)):
        raise CaptureError(
            f"forward: expected ops that run on what they get, got {failed[1]}{where and f' ({where})'}; correct the "
            "model or its inputs; where they run without a plan, plan stages"
        ) from error
    raise CaptureError(
        f"profile: expected a forward that torch.compile traces as one graph, got a break ({said[0]}"
        f"{where and f', {where}'}); {REMEDY}"
    ) from error


def _line_of_forward(said: list[str]) -> str:
    """The innermost line of the traceback in torch's words; one that is not torch's own where there is any."""
    lines = [number for number, line in enumerate(said) if line.startswith("File ")]
    own = [number for number in lines if not said[number].startswith(f'File "{_TORCH}')]
    return ": ".join(said[(own or lines)[-1] : (own or lines)[-1] + 2]) if lines else ""
