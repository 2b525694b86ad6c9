"""Backends of torch.compile that run a step in a given order of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd

from planner.compiled.programs import programs_of
from profiler.capture.joint_graph import JointGraph

ChooseOrder = Callable[[JointGraph], tuple[Sequence[str], str]]


def eager_backend(choose: ChooseOrder) -> Any:
    """A backend that runs the ops as they are, through generated Python code.

    Args:
        choose: the order for a graph, and what stands for the loss in it; as for ``programs_of``.
    """

    def partition(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        graph = JointGraph(module, num_fwd_outputs)
        return programs_of(graph, *choose(graph))

    return aot_autograd(fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=partition)


def _as_it_is(module: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        return module.forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
