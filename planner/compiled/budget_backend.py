"""A backend of torch.compile that plans each graph's ops for a budget as the graph is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import CompileContext
from torch.utils._python_dispatch import _disable_current_modes

from planner.compiled.applying import Backend, maker_of
from planner.plans.graph_solving import GraphSearch, order_within, second_runs
from planner.steps.graph_problem import StepSurroundings, step_problem
from planner.units import parse_bytes, parse_bytes_or_zero
from profiler.capture.graph_profiling import measured_graph
from profiler.capture.joint_graph import JointGraph
from profiler.capture.programs import StepOrder
from profiler.capture.random_ops import device_of
from profiler.step_graph import StepGraph
from profiler.step_replay import runs_once

# Of the output's bytes, what a loss has at once beside it: measured for square().mean(), in whose backward are the
# gradient of the square, the power, its multiple and the product.
LOSS_COPIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPlan:
    """What was decided for one graph.

    Attributes:
        predicted_peak_bytes: of the step, by what the backend sees of it.
        once_peak_bytes: the same where every op runs once.
        recomputed_ops: runs beside each op's first.
    """

    predicted_peak_bytes: int
    once_peak_bytes: int
    recomputed_ops: int


def backend(
    budget: str | int,
    *,
    reserved: str | int = 0,
    compiler: Backend = "eager",
    solver: str = "auto",
    time_limit_seconds: float | None = None,
) -> BudgetBackend:
    """A backend for ``torch.compile(model, backend=planner.backend("8GiB"), dynamic=False)``.

    As a model's forward is compiled, its ops and those of its backward are measured on tensors of their shapes, and run
    in an order whose peak is within the budget. Each set of guards (other shapes, other arguments) has its own.

    The backend sees the graph alone: its parameters, buffers and batch, what the ops make, and gradients. It takes it
    that the loop holds the output until the next one comes, and that the loss takes four times the output's bytes.
    ``reserved`` is for what it does not see: the optimizer's states and the temporaries of its step, gradients
    that are kept, other models. ``planner.profile(workload, graph=True)`` measures all this instead.

    Where a model breaks into several graphs, or its shapes are symbols, torch's own partition runs, and a warning says
    that the budget is not promised.

    Args:
        budget: the most bytes alive at once, or ``"8GiB"``.
        reserved: of the budget, what is not the graph's.
        compiler: that makes the programs run, as ``backend`` of ``planner.apply``. With ``"inductor"`` the peak is near
            the budget and may be above it: only ``planner.verify`` measures it.
        solver: a name of ``solvers.graph_solver_names()``.
        time_limit_seconds: for the search, of each graph.

    Raises:
        ValueError: a budget that does not parse, no such compiler, or one that is missing. The compiled model raises
            torch's BackendCompilerFailed from ``Infeasible`` or ``NothingFound`` where no order of runs fits.
    """
    return BudgetBackend(
        parse_bytes(budget),
        parse_bytes_or_zero(reserved),
        maker_of(compiler),
        compiler,
        GraphSearch(solver, time_limit_seconds),
    )


class BudgetBackend:
    """Compiles graphs for torch.compile.

    Attributes:
        plans: what was decided, in the order of compiling.
    """

    def __init__(
        self,
        budget_bytes: int,
        reserved_bytes: int,
        make: Callable[..., Any],
        compiler: Backend,
        search: GraphSearch,
    ) -> None:
        self.plans: list[CompiledPlan] = []
        self._budget_bytes, self._reserved_bytes = budget_bytes, reserved_bytes
        self._make = make
        self._compiler: Backend = compiler
        self._search = search
        self._frames: set[Any] = set()
        self._broken = False

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile a graph that Dynamo has traced."""
        trains = any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        if not (trains and torch.is_grad_enabled()):
            return _unplanned(self._compiler)(module, inputs)
        if why := self._why_not(module, inputs):
            warnings.warn(
                f"planner.backend: expected a model that is one graph of fixed shapes, got {why}; torch's own "
                "partition runs, and the budget is not promised",
                RuntimeWarning,
                stacklevel=2,
            )
            return _unplanned(self._compiler)(module, inputs)
        return self._make(self._order)(module, inputs)

    def _why_not(self, module: fx.GraphModule, inputs: list[Any]) -> str:
        """Why a graph is not planned, in words; empty where it is."""
        now = CompileContext.current_compile_id()
        self._frames.add(None if now is None else now.frame_id)
        reason = getattr(module, "compile_subgraph_reason", None)
        self._broken |= (reason is not None and reason.graph_break) or len(self._frames) > 1
        if self._broken:
            said = f" ({reason.reason})" if reason is not None and reason.graph_break else ""
            return f"one of several{said}: see where it breaks with fullgraph=True, and make a backend for each model"
        if any(map(_is_symbolic, inputs)):
            return "symbols: compile with dynamic=False"
        return ""

    def _order(self, graph: JointGraph) -> StepOrder:
        device = device_of(graph.ops[0])
        with _disable_current_modes():
            step = measured_graph(graph, device)
        around = _surroundings(step, self._reserved_bytes, device)
        found = order_within(self._budget_bytes, step, around, step_problem(step, around), self._search)
        self.plans.append(
            CompiledPlan(
                predicted_peak_bytes=found.peak_bytes,
                once_peak_bytes=around.peak_bytes(step, runs_once(step)),
                recomputed_ops=len(second_runs(found.runs)),
            )
        )
        return StepOrder.of(step, found.runs)


def _surroundings(step: StepGraph, reserved_bytes: int, device: torch.device) -> StepSurroundings:
    """The bytes around a graph's programs as far as they can be known as it is compiled."""
    there_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    resident_bytes = max(step.resident_bytes, there_bytes) + reserved_bytes
    returned_bytes = sum(storage.size_bytes for storage in step.storages if storage.returned)
    gradient_bytes = sum(storage.size_bytes for storage in step.storages if storage.gradient)
    of_loss_bytes = sum(storage.size_bytes for storage in step.storages if storage.of_loss)
    return StepSurroundings(
        forward_bytes=resident_bytes + returned_bytes,  # The last step's output is still bound.
        backward_bytes=resident_bytes + returned_bytes,
        loss_bytes=resident_bytes + LOSS_COPIES * of_loss_bytes,
        other_peak_bytes=resident_bytes + returned_bytes + gradient_bytes,
        held_bytes=returned_bytes,
    )


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _unplanned(compiler: Backend) -> Any:
    if compiler == "inductor":
        from torch._inductor.compile_fx import compile_fx

        return compile_fx
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition

    def as_it_is(module: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=as_it_is, partition_fn=min_cut_rematerialization_partition)
