"""One call for a training script: profile, solve and apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from planner.plans.offload_request import Offload, OffloadMode
from planner.plans.profiling import profile
from planner.plans.solving import Numerics, solve
from planner.runtime.applier import apply
from planner.training.dynamic_shapes import apply_dynamic
from planner.training.plan_cache import CACHE_SIZE
from planner.training.verification import can_verify, verify as verified
from profiler.trace.partition import Stages
from profiler.workload.workload import Workload


def auto_checkpoint(
    model: nn.Module | Workload,
    inputs: Any = None,
    *,
    budget: str | int,
    stages: Stages = None,
    solver: str = "auto",
    offload: Offload | OffloadMode = "auto",
    headroom: str | int = 0,
    numerics: Numerics = "eager",
    verify: bool = True,
    dynamic: bool = False,
    sizes: Sequence[Any] = (),
    cache_size: int = CACHE_SIZE,
    strict: bool = False,
) -> nn.Module:
    """Profile the model on one batch, solve for ``budget`` and apply the plan.

    With ``dynamic`` batches may have other shapes than ``inputs``. Plans are
    kept per signature (shapes and types of the tensors that the model is called
    with, and its plain arguments other than floats). One that is new runs with
    a plan that is safe, while a thread finds its own from the profiles that there
    are: interpolated between two sizes on a line, else that of the smallest
    signature known to be in no dimension smaller. Training never waits for a
    solver, and nothing is profiled by itself after this call; nothing is sent to
    host memory either. ``planner.handle_of(model)`` is then a ``DynamicHandle``.

    Args:
        model: the training step as a ``Workload``, whose model is planned in place; or the model alone, in training
            mode, where it returns its loss and is trained without an optimizer. Give a workload with the optimizer you
            train with, because its states and its step count in the budget.
        inputs: beside a model: one batch (tensor, tuple or dict), as for ``Workload``.
        budget: the most bytes on the device at once during a whole step.
        stages, solver, offload, headroom, numerics: as for ``profile`` and ``solve``; ``numerics`` is ``"eager"`` with
            ``dynamic``.
        verify: check the plan against its own run and use the fastest of those that were run, as ``planner.verify``
            does, where that can be: not with ``dynamic``, compiled models, and steps that do not fit unplanned.
        dynamic: batches change their shapes.
        sizes: more batches to profile now (or a ``Workload`` each, where the loss depends on the batch): give the
            smallest and the largest, and one or two in between where memory does not grow linearly. A budget in
            percent is one of the unplanned peak of ``inputs``.
        cache_size: signatures to remember beside those profiled; the least recently used one is forgotten first.
        strict: raise Infeasible from the forward of a signature that no plan meets the budget for, once that is
            known; without, it is said once and the plan that needs least memory is used.

    Returns:
        The same model; ``planner.handle_of(model)`` gives the handle to inspect
        the plan or to remove it.

    Raises:
        Infeasible: no plan fits one of the given batches; carries the smallest feasible budget.
        ProfileError, ValueError: as ``profile`` and ``solve``; with ``dynamic`` also where the model is compiled, has
            other stages at one size than at another, or is to offload.
    """
    if isinstance(model, Workload) and inputs is not None:
        raise ValueError("auto_checkpoint: inputs were given beside a Workload, which has its own; leave them out")
    workload = model if isinstance(model, Workload) else Workload(model=model, inputs=inputs)
    if dynamic:
        if offload not in ("auto", "never"):
            raise ValueError(
                f"auto_checkpoint: dynamic=True has no offload={offload!r}, because plans for changing shapes only "
                "recompute; leave one of them out"
            )
        if numerics != "eager":
            raise ValueError(f"auto_checkpoint: dynamic=True has no numerics={numerics!r}; leave one of them out")
        if workload.custom_step is not None:
            raise ValueError(
                "auto_checkpoint: dynamic=True needs the loss and optimizer of a workload, not step=; give these"
            )
        apply_dynamic(
            workload,
            sizes=sizes,
            budget=budget,
            stages=stages,
            solver=solver,
            headroom=headroom,
            cache_size=cache_size,
            strict=strict,
        )
        return workload.model
    if sizes:
        raise ValueError("auto_checkpoint: sizes were given without dynamic=True; pass dynamic=True")
    measured = profile(workload, stages=stages, numerics=numerics)
    plan = solve(measured, budget, solver=solver, offload=offload, headroom=headroom, numerics=numerics)
    if verify and can_verify(workload, plan):
        plan = verified(workload, plan, solver=solver).plan
    apply(workload.model, plan)
    return workload.model
