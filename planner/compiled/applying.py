"""Installs a plan of single ops on the real model; ``apply`` takes plans of both kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from planner.plans.given_sources import plan_from_file
from planner.plans.graph_plan import GraphPlan
from planner.plans.plan import Plan
from planner.runtime import applier
from planner.runtime.applier import Handle, check_unplanned, register
from planner.runtime.given_arguments import given_model
from profiler.workload.forward_patches import ForwardPatches
from profiler.workload.model_caches import check_no_checkpointing
from profiler.workload.wrapped_models import inner_model

if TYPE_CHECKING:
    from profiler.capture.backend import OrderOf

Backend = Literal["eager", "inductor"]


def apply(
    model: nn.Module,
    plan: Plan | GraphPlan | str | Path,
    *,
    watch: bool | None = None,
    backend: Backend = "eager",
) -> Handle[Any]:
    """What ``planner.apply`` does in each process; arguments and errors are as there."""
    _check_name(backend)
    if isinstance(plan, (str, Path)):
        plan = plan_from_file(plan)
    if not isinstance(plan, GraphPlan):
        if backend != "eager":
            raise ValueError(
                f"backend: expected 'eager' for a plan of stages, got {backend!r}; compile the model itself "
                "(torch.compile), before or after"
            )
        return applier.apply(model, plan, watch=watch)
    if watch:
        raise ValueError(
            "watch: expected a plan of stages to watch the loop of, got one of single ops; leave watch out, and hold "
            "planner.measure(Workload(..., step=...)) against the plan's predicted_peak_bytes"
        )
    if plan.copies and backend != "eager":
        raise ValueError(
            f"backend: expected 'eager' for a plan of single ops that sends values to host memory, got {backend!r}; "
            "solve with offload='never' (--no-offload)"
        )
    model = inner_model(given_model(model))
    check_unplanned(model)
    check_no_checkpointing(model, "apply")
    from planner.compiled.planned_forward import PlannedForward  # It loads what torch.compile is made of.

    patches = ForwardPatches()
    planned = PlannedForward(model, plan, maker_of(backend, torch.device(plan.device)))
    patches.wrap(model, lambda _: planned.run)
    handle = Handle(model, plan, patches)
    register(model, handle)
    return handle


def maker_of(backend: Backend, device: torch.device | None = None) -> Callable[[OrderOf], Any]:
    """What makes a backend of torch.compile from what chooses an order.

    Args:
        backend: its name.
        device: that has to have a compiler; None for one that is not known yet.

    Raises:
        ValueError: no such backend, or its compiler is missing.
    """
    _check_name(backend)
    if backend == "eager":
        from profiler.capture.backend import eager_backend

        return eager_backend
    from planner.compiled.inductor_programs import check_compiler, inductor_backend  # It loads all of Inductor.

    if device is not None:
        check_compiler(device)
    return inductor_backend


def _check_name(backend: str) -> None:
    if backend not in get_args(Backend):
        raise ValueError(f"backend: expected one of {get_args(Backend)}, got {backend!r}; leave it out, or take one")
