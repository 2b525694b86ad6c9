"""Backends of torch.compile that run a step in a given order of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import fx
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen

from profiler.capture.joint_graph import REMEDY, CaptureError, JointGraph, never_compiled
from profiler.capture.programs import StepOrder, programs_of

OnProgram = Callable[[Literal["forward", "backward"], Literal["begin", "end"], Mapping[str, Any]], None]
OrderOf = Callable[[JointGraph], StepOrder]
Compiler = Callable[[fx.GraphModule, Any], Callable[[list[Any]], Any]]


def eager_backend(choose: OrderOf, on_program: OnProgram | None = None) -> Any:
    """A backend that runs the ops as they are, through generated Python code.

    Args:
        choose: the order for a graph.
        on_program: is told when a program begins, and with which inputs by name, and when it ends.
    """
    return backend_of(choose, _running("forward", on_program), _running("backward", on_program))


def backend_of(choose: OrderOf, forward: Compiler, backward: Compiler) -> Any:
    """A backend that has the two programs compiled.

    Args:
        choose: the order for a graph.
        forward, backward: make of a program and example inputs what runs; it takes the inputs as a list and empties it.
    """

    def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        graph = JointGraph(module, num_fwd_outputs)
        return programs_of(graph, choose(graph))

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=_letting_go(backward),
        inference_compiler=never_compiled,
        partition_fn=partition,
    )


def _letting_go(backward: Compiler) -> Compiler:
    """A compiler whose programs refuse to run where what they read is to stay."""

    def compiler(module: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        compiled = backward(module, inputs)

        def run(arguments: list[Any]) -> Any:
            if _get_current_graph_task_keep_graph():
                raise CaptureError(
                    "backward: expected one that lets go of what forward has saved, as the plan counts on, got "
                    "retain_graph=True; "
                    f"call it without, and once: add losses up before; or {REMEDY}"
                )
            return compiled(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compiler


def _running(side: Literal["forward", "backward"], on_program: OnProgram | None) -> Compiler:
    def compiler(module: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        module.graph.set_codegen(_BoxedCodeGen())  # A graph without a backward is no program, and comes as it is.
        module.recompile()
        names = [node.name for node in module.graph.find_nodes(op="placeholder")]

        def run(arguments: list[Any]) -> Any:
            if on_program is None:
                return module.forward(arguments)
            on_program(side, "begin", dict(zip(names, arguments, strict=True)))
            result = module.forward(arguments)
            on_program(side, "end", {})
            return result

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compiler
