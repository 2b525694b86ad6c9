"""Programs of a stage compiled by Inductor, with the plan's order of runs and all of its values.

Inductor would move a value into the kernels that read it, and join kernels that read the same: what it reads then lives
longer than planned, and what is computed twice lives from the first time on. So each run's result is a buffer made in
its turn, and only kernels that follow each other are joined; a buffer that nobody reads but the next kernel goes then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from profiler.trace.joint_graph import draws, random_state, run_from_state


def check_compiler(device: torch.device) -> None:
    """Refuse a machine whose C++ compiler, which Inductor needs for the CPU, is missing; raises ValueError."""
    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ValueError(
                f"backend: 'inductor' on the CPU needs a C++ compiler, and none was found ({error}); install one, or "
                "apply the plan with backend='eager'"
            ) from error


class _NeighboursOnly(InductorChoices):
    """Joins kernels only where one directly follows the other."""

    @staticmethod
    def uuid() -> str:
        """Names these choices in the keys of Inductor's caches."""
        return "sublinear-planner: neighbours only"

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether to join two kernels."""
        first, then = (node1, node2) if node1.min_order < node2.min_order else (node2, node1)
        follows = then.min_order == first.max_order + 1
        return follows and InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)


def compiled_program(program: fx.GraphModule, *, is_backward: bool) -> Callable[[list[Any]], Any]:
    """The program compiled: it takes a list of inputs, which it empties, and returns the outputs.

    Args:
        program: its inputs and what its ops make are known as fake tensors.
        is_backward: that of a backward.
    """
    _save_states_with_their_runs(program)
    inputs = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(inputs)
    assert mode is not None
    with ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        # Random numbers are those of torch's own ops, in the order of the program.
        stack.enter_context(config.patch(fallback_random=True, reorder_for_peak_memory=False))
        stack.enter_context(config.patch(inductor_choices_class=_NeighboursOnly))
        stack.enter_context(V.set_choices_handler(_NeighboursOnly()))
        stack.enter_context(V.set_fake_mode(mode))
        decomposed = _decomposed(program, inputs)
        (output,) = decomposed.graph.find_nodes(op="output")
        # Saved tensors, too, have the strides that the backward's program was traced with.
        output.meta["user_visible_output_idxs"] = [
            k for k, each in enumerate(output.args[0]) if isinstance(each, fx.Node)
        ]
        return compile_fx_inner(decomposed, inputs, is_backward=is_backward, cudagraphs=BoxedBool(False))  # pyright: ignore[reportReturnType]


def _decomposed(program: fx.GraphModule, inputs: Any) -> fx.GraphModule:
    """The program in ops that Inductor has kernels for, each run's results pinned."""
    mode = detect_fake_mode(inputs)
    assert mode is not None
    with torch.no_grad(), patch.object(mode, "allow_non_fake_inputs", True):  # It may hold constants.
        return make_fx(_Pinning(program).run, decomposition_table=select_decomp_table())(*inputs)


class _Pinning(fx.Interpreter):
    """Runs a program; what a run makes is a buffer then, with the strides that it has."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One run."""
        read = {_storage(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}

        def pinned(value: Any) -> Any:
            if not isinstance(value, FakeTensor) or _storage(value) in read:
                return value
            return torch.ops.prims.inductor_force_stride_order.default(value, value.stride())

        return pytree.tree_map(pinned, super().call_function(target, args, kwargs))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _save_states_with_their_runs(program: fx.GraphModule) -> None:
    """Have random ops save the state that they draw from, and draw from it, by ops of torch that Inductor knows."""
    graph = program.graph
    for node in graph.find_nodes(op="call_function", target=random_state):
        run = node.next
        while not draws(run):
            run = run.next
        with graph.inserting_before(run):
            both = graph.call_function(run_and_save_rng_state, (run.target, *run.args), run.kwargs)
            node.replace_all_uses_with(graph.call_function(operator.getitem, (both, 0)))
            run.replace_all_uses_with(graph.call_function(operator.getitem, (both, 1)))
        graph.erase_node(run)
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=run_from_state):
        state, _, op, *args = node.args
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.call_function(run_with_rng_state, (state, op, *args), node.kwargs))
        graph.erase_node(node)
    program.recompile()
