"""A backend of torch.compile that plans each graph's ops for a budget as the graph is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import CompileContext
from torch.utils._python_dispatch import _disable_current_modes

from planner.compiled.applying import Backend, maker_of
from planner.compiled.compiled_graphs import CompiledGraph, StepWatch
from planner.compiled.graph_shares import GraphOptions, GraphTurns, choose_options, options_of
from planner.plans.graph_solving import GraphSearch, order_within
from planner.steps.graph_problem import StepSurroundings, step_problem
from planner.units import parse_bytes, parse_bytes_or_zero
from profiler.caller_warnings import warn_caller
from profiler.capture.joint_graph import JointGraph
from profiler.capture.programs import StepOrder
from profiler.capture.random_ops import device_of
from profiler.measurement.device_memory import requested_bytes
from profiler.measurement.op_costs import measured_graph
from profiler.step_graph import StepGraph
from profiler.step_replay import runs_once

# Of the output's bytes, what a loss has at once beside it: measured for square().mean(), in whose backward are the
# gradient of the square, the power, its multiple and the product.
LOSS_COPIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPlan:
    """What was decided for one graph.

    Attributes:
        predicted_peak_bytes: of the step, by what the backend sees of it; of several graphs of the largest step that
            runs this one, once it is known.
        once_peak_bytes: the same where every op of the graph runs once.
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

    Of a model that breaks into several graphs not all are known as the first is compiled: the first step runs each in
    the order that keeps least for its backward. Then one integer program chooses an order for each of them, so that
    the step keeps the budget in the least time, and the graphs are compiled again. What ops between graphs keep for
    backward counts, what they take while they run does not. Where shapes are symbols, torch's own partition runs, and a
    warning says that the budget is not promised.

    Args:
        budget: the most bytes alive at once, or ``"8GiB"``.
        reserved: of the budget, what is not the graph's.
        compiler: that makes the programs run, as ``backend`` of ``planner.apply``. With ``"inductor"`` the peak is near
            the budget and may be above it: only ``planner.verify`` measures it.
        solver: a name of ``solvers.graph_solver_names()``.
        time_limit_seconds: for the search, of each graph.

    Raises:
        ValueError: a budget that does not parse, no such compiler, or one that is missing. The compiled model raises
            torch's BackendCompilerFailed from ``Infeasible`` or ``NothingFound`` where no order of runs fits; of
            several graphs that fit one by one and not together, NothingFound itself, from the second step.
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
        self._graphs: list[CompiledGraph] = []
        self._options: dict[int, GraphOptions] = {}
        self._steps: list[GraphTurns] = []
        self._watch = StepWatch(self._seen)

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile a graph that Dynamo has traced."""
        trains = any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        if not (trains and torch.is_grad_enabled()):
            return _unplanned(self._compiler)(module, inputs)
        if any(map(_is_symbolic, inputs)):
            warn_caller(
                "planner.backend: expected a model of fixed shapes, got symbols: compile with dynamic=False; torch's "
                "own partition runs, and the budget is not promised",
            )
            return _unplanned(self._compiler)(module, inputs)
        graph = CompiledGraph(len(self._graphs), module, self._make, self._watch)
        graph.compile(inputs, self._frugal_order if self._is_one_of_several(module) else self._order)
        self._graphs.append(graph)
        return graph

    def _is_one_of_several(self, module: fx.GraphModule) -> bool:
        """Whether the frame breaks after this graph, or another one has been compiled before."""
        now = CompileContext.current_compile_id()
        self._frames.add(None if now is None else now.frame_id)
        reason = getattr(module, "compile_subgraph_reason", None)
        return len(self._frames) > 1 or (reason is not None and reason.graph_break)

    def _order(self, graph: CompiledGraph, joint: JointGraph) -> StepOrder:
        """For a graph that is the whole step, as far as is known."""
        device = device_of(joint.ops[0])
        step = graph.step = _measured(joint)
        around = _surroundings(step, self._reserved_bytes, device)
        found = order_within(self._budget_bytes, step, around, step_problem(step, around), self._search)
        self.plans.append(
            CompiledPlan(
                predicted_peak_bytes=found.peak_bytes,
                once_peak_bytes=around.peak_bytes(step, runs_once(step)),
                recomputed_ops=found.runs.again.total(),
            )
        )
        return StepOrder.of(step, found.runs)

    def _frugal_order(self, graph: CompiledGraph, joint: JointGraph) -> StepOrder:
        """For a graph beside others that are not known yet: what keeps least for its backward."""
        step = graph.step = _measured(joint)
        around = _surroundings(step, self._reserved_bytes, device_of(joint.ops[0]))
        least = self._options_of(graph).options[0]
        self.plans.append(
            CompiledPlan(
                predicted_peak_bytes=around.peak_bytes(step, least.runs),
                once_peak_bytes=around.peak_bytes(step, runs_once(step)),
                recomputed_ops=least.runs.again.total(),
            )
        )
        return StepOrder.of(step, least.runs)

    def _options_of(self, graph: CompiledGraph) -> GraphOptions:
        assert graph.step is not None
        if graph.number not in self._options:
            room_bytes = self._budget_bytes - self._reserved_bytes - graph.step.resident_bytes
            self._options[graph.number] = options_of(graph.step, room_bytes, self._search, loss_copies=LOSS_COPIES)
        return self._options[graph.number]

    def _seen(self, step: GraphTurns) -> None:
        """A step has run other graphs than those before: an order is chosen for each graph of all steps."""
        if len(step.graphs) == 1 and not self._options:
            return  # The order of its only graph was chosen for the whole budget.
        step = replace(step, resident_bytes=step.resident_bytes + self._reserved_bytes)
        graphs = [self._options_of(graph) for graph in self._graphs]
        taken = choose_options(self._budget_bytes, graphs, [*self._steps, step])
        self._steps.append(step)
        for number in {number for each in self._steps for number in each.graphs}:
            graph = self._graphs[number]
            assert graph.step is not None
            graph.compile_again(StepOrder.of(graph.step, taken[number].runs))
            largest = max(each.peak_bytes(graphs, taken) for each in self._steps if number in each.graphs)
            self.plans[number] = replace(
                self.plans[number],
                predicted_peak_bytes=largest,
                recomputed_ops=taken[number].runs.again.total(),
            )


def _measured(joint: JointGraph) -> StepGraph:
    with _disable_current_modes():
        return measured_graph(joint, device_of(joint.ops[0]))


def _surroundings(step: StepGraph, reserved_bytes: int, device: torch.device) -> StepSurroundings:
    """The bytes around a graph's programs as far as they can be known as it is compiled."""
    there_bytes = requested_bytes(device).now if device.type == "cuda" else 0
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
