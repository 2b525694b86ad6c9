"""A model's forward that runs, in training, as the two programs of a plan of single ops."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

from planner.compiled.host_copies import HostCopies
from planner.plans.graph_plan import GraphPlan
from planner.plans.graph_solving import first_difference
from planner.runtime.model_match import PlanMismatch, check_precision
from planner.runtime.plan_checks import speak_for
from profiler.capture.backend import OrderOf
from profiler.capture.detached_outputs import refusing_gradients, without_gradients
from profiler.capture.joint_graph import JointGraph, compiled_whole, raise_as_said
from profiler.capture.programs import StepOrder
from profiler.capture.step_dataflow import step_graph_of
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.compiled_forwards import Forward
from profiler.workload.model_caches import ModelCaches
from profiler.workload.precision import autocast_now
from profiler.workload.torch_flags import stacks_kept


class PlannedForward:
    """A model's forward that runs as two programs in training.

    Args:
        model: its model.
        plan: for it.
        make_backend: makes a backend of torch.compile from what chooses an order.
    """

    def __init__(self, model: nn.Module, plan: GraphPlan, make_backend: Callable[[OrderOf], Any]) -> None:
        self._model = weakref.ref(model)
        self._plan = plan
        self._device = torch.device(plan.device)
        self._plain: Forward = model.forward
        unused = frozenset(plan.unused_outputs)
        self._compiled = compiled_whole(without_gradients(self._plain, unused), make_backend(self._order))
        self._caches = ModelCaches(model)
        self._copies = HostCopies(plan.model_class, plan.link, plan.host_bytes)
        self._said: set[str] = set()
        self._autocast: torch.dtype | None = None  # where the forward is called; AOTAutograd traces outside of it

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, planned in training."""
        model = self._model()
        if model is None or not model.training or not torch.is_grad_enabled() or not _trains(model, (args, kwargs)):
            return self._plain(*args, **kwargs)
        speak_for(self._said)
        self._autocast = autocast_now(self._device)
        with stacks_kept(), self._caches.off(kwargs):
            try:
                output = self._compiled(*args, **kwargs)
            except Exception as error:
                raise_as_said(error, PlanMismatch)
                raise
        return refusing_gradients(output, self._plan.unused_outputs, _not_used)

    def _order(self, graph: JointGraph) -> StepOrder:
        """The plan's order for a new graph: Dynamo has guards on types, on autocast and on what the forward reads."""
        plan, model = self._plan, self._model()
        if model is not None:
            check_precision(model, plan.precision, self._autocast)
        if differs := first_difference(plan.graph, step_graph_of(graph)):
            raise PlanMismatch(
                f"apply: expected the {plan.model_class} and batch that were profiled, got ops that differ: {differs}; "
                "this batch is of another size (leave out a last, smaller one: drop_last=True), or a part of the model "
                "was frozen, merged, replaced or put in evaluation since. Take the plan off "
                "(planner.handle_of(model).remove()), and profile and solve for it as it is now; a plan of stages "
                "(without graph=True) goes on where a model changes or a batch is smaller"
            )
        return StepOrder.of(plan.graph, plan.runs)._replace(copies=plan.copies, calls=self._copies.calls)


def _trains(model: nn.Module, arguments: Any) -> bool:
    """Whether anything that its forward reads takes a gradient."""
    return any(tensor.requires_grad for tensor in chain(model.parameters(), tensors_in(arguments)))


def _not_used() -> PlanMismatch:
    return PlanMismatch(
        "apply: expected a loss that uses what the profiled step's loss used, got a gradient for an output that it did "
        "not use; profile with the loss that you train with"
    )
