"""What ``planner.apply`` is given, a model and a plan or its file; other kinds are refused in words."""

from __future__ import annotations

from typing import Any

from torch import nn

from planner.plans.given_sources import object_or_file, type_in_words
from planner.plans.plan import Plan
from planner.plans.plan_claims import PlanClaims
from profiler.records import Profile
from profiler.workload.given_models import check_initialised
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
        raise ValueError("apply: expected a torch.nn.Module, got a Workload; pass workload.model")
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"apply: expected a torch.nn.Module, got {type_in_words(model)}; "
            "call planner.apply(model, plan), the model first"
        )
    check_initialised(model, "apply")
    return model


def _remedy(plan: Any) -> str:
    if isinstance(plan, Profile):
        return "solve it first: plan = planner.solve(profile, budget=...)"
    if isinstance(plan, (Workload, nn.Module)):
        return "profile and solve first: plan = planner.solve(planner.profile(workload), budget=...)"
    if isinstance(getattr(plan, "plan", None), PlanClaims):
        return "pass its plan attribute"
    return "pass what planner.solve returned"
