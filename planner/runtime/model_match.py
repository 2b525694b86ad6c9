"""Whether ``planner.apply`` is given a plan and the model that it was made for: stages, shapes and precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from planner.plans.plan import Plan, PlannedStage
from planner.plans.sources import object_or_file, type_in_words
from planner.runtime.stage_places import module_named, split_name
from profiler.records import Profile
from profiler.workload.compiled_forwards import COMPILED, plain_name
from profiler.workload.given_models import check_initialised, class_name, precision_of, types_part
from profiler.workload.workload import Workload


def given_plan(plan: Any, caller: str = "apply") -> Plan:
    """The plan, read from its file where a path is given; ``caller`` names in errors who was given it.

    Raises:
        ValueError: it is of another kind, or the file is no plan.
    """
    return object_or_file(plan, Plan, caller, _remedy)


def given_model(model: Any) -> nn.Module:
    """The model, with parameters that have shapes.

    Raises:
        ValueError: it is of another kind, or has lazy modules that have not run.
    """
    if isinstance(model, Workload):
        raise ValueError("apply: the model is a Workload, not a torch.nn.Module; pass workload.model")
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"apply: the model is {type_in_words(model)}, not a torch.nn.Module; "
            "call planner.apply(model, plan), the model first"
        )
    check_initialised(model, "apply")
    return model


def _remedy(plan: Any) -> str:
    if isinstance(plan, Profile):
        return "solve it first: plan = planner.solve(profile, budget=...)"
    if isinstance(plan, (Workload, nn.Module)):
        return "profile and solve first: plan = planner.solve(planner.profile(workload), budget=...)"
    if isinstance(getattr(plan, "plan", None), Plan):
        return "pass its plan attribute"
    return "pass what planner.solve returned"


class PlanMismatch(ValueError):
    """The model is not the one that the plan was made for; the message says what differs."""


def check_model(model: nn.Module, plan: Plan) -> None:
    """Refuse a model of which a stage is another module, or has parameters of other shapes; raises PlanMismatch."""
    differences = [text for stage in plan.stages if stage.kind == "stage" if (text := _difference(model, stage))]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise PlanMismatch(
            f"apply: this {type(model).__name__} differs from the {plan.model_class} that was profiled: "
            f"{'; '.join(differences[:3])}{more}; profile and solve for this model"
        )


def check_types(model: nn.Module, plan: Plan) -> None:
    """Refuse parameters of other types, the part of the precision that shows before the model runs.

    Raises:
        PlanMismatch: they are others.
    """
    expected, got = types_part(plan.precision), precision_of(model, None)
    if got != expected:
        raise PlanMismatch(
            f"the parameters are in {got}, and the plan for {plan.precision} needs {expected}; "
            "use them as they were profiled, or profile and solve for these"
        )


def check_precision(model: nn.Module, precision: str, autocast: torch.dtype | None) -> None:
    """Refuse a step in another precision than the plan's: bytes, casts and kernels are others then.

    Raises:
        PlanMismatch: the parameters' types, or what autocast casts to.
    """
    expected, got = precision.removesuffix(COMPILED), precision_of(model, autocast)
    if got != expected:
        raise PlanMismatch(
            f"the step runs in {got}, and the plan is for {expected}; "
            "run it as it was profiled, or profile and solve in this precision"
        )


def _difference(model: nn.Module, stage: PlannedStage) -> str:
    """The first thing in which a stage's module differs from the profiled one; empty where there is none."""
    name, _ = split_name(stage.name)
    try:
        module = module_named(model, name)
    except AttributeError:
        return f"it has no module {name!r}"
    if class_name(module) != stage.record.module_class:
        return f"{name!r} is a {class_name(module)}, expected {stage.record.module_class}"
    shapes = {plain_name(key): tuple(p.shape) for key, p in module.named_parameters()}
    expected = dict(stage.record.parameter_shapes)
    for key in sorted({*shapes, *expected}):
        if shapes.get(key) != expected.get(key):
            return f"{name}.{key} has shape {shapes.get(key)}, expected {expected.get(key)}"
    return ""
