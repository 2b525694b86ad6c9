"""Solving on several ranks: the first one solves, and all have its plan. Loads no torch by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from planner.plans import solving
from planner.plans.given_sources import profile_of_either_kind
from planner.plans.graph_plan import GraphPlan
from planner.plans.offload_request import Offload, OffloadMode
from planner.plans.plan import Plan
from planner.plans.solving import Reshard
from planner.units import format_bytes
from profiler.graph_profile import GraphProfile
from profiler.progress import tell
from profiler.records import Profile

if TYPE_CHECKING:
    from planner.distributed.ranks import Ranks


@overload
def solve(
    profile: GraphProfile,
    budget: str | int,
    *,
    solver: str = ...,
    time_limit_seconds: float | None = ...,
    offload: Offload | OffloadMode = ...,
    headroom: str | int = ...,
    gap: float | None = ...,
) -> GraphPlan: ...


@overload
def solve(
    profile: Profile | str | Path,
    budget: str | int,
    *,
    solver: str = ...,
    time_limit_seconds: float | None = ...,
    offload: Offload | OffloadMode = ...,
    headroom: str | int = ...,
    reshard: Reshard = ...,
) -> Plan: ...


def solve(
    profile: Profile | GraphProfile | str | Path,
    budget: str | int,
    *,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    offload: Offload | OffloadMode = "auto",
    headroom: str | int = 0,
    gap: float | None = None,
    reshard: Reshard = "profiled",
) -> Plan | GraphPlan:
    """Choose what to keep, recompute and offload so that the step's true peak stays within ``budget``.

    Where ``torch.distributed`` is initialised for several ranks, all of them call this: the first one solves, and all
    get its plan. The budget is that of each device, and the predicted peak that of the worst rank. In a pipeline each
    rank solves for its own stage, and gets its own plan.

    Args:
        profile: a Profile, of stages or of a graph (``planner.profile(..., graph=True)``), or the path of its file.
        budget: bytes, ``"8GiB"``, ``"512MiB"`` or ``"70%"`` of the unplanned peak.
        solver: a name of ``solvers.solver_names()``, of a graph one of ``solvers.graph_solver_names()``.
        time_limit_seconds: for solvers that search (``ilp``, ``auto``, and all for graphs; with a link a graph's plan
            takes several searches, each of so long).
        offload: ``"auto"`` (where the profile has a link to host memory), ``"never"``, ``"only"``, or an ``Offload``
            that says how fast the link is and how much the host may hold.
        headroom: of the budget, what is left to the device's allocator: bytes, or ``"5%"`` of the budget.
        gap: of a graph: the search ends this close to the bound, a share; None for 0.001.
        reshard: of stages that are units of ``fully_shard``, whether they give their parameters back after forward:
            ``"profiled"``, as they did then, or ``"solve"``: some may keep them, for one gather less.

    Returns:
        The plan, replayed in exact bytes, with its bound; of a graph's profile a GraphPlan.

    Raises:
        Infeasible: no plan of stages was found; its status says whether it is proven that none fits, and it carries
            the smallest budget known to be enough. On all ranks.
        NothingFound: no plan of single ops was found, and nothing is proven. On all ranks.
        RankError: one rank failed, or ranks gave different profiles or budgets.
        ValueError: no profile, unknown solver, a budget or headroom that does not parse, or offloading demanded where
            nothing can be sent.
    """
    settings: dict[str, Any] = {
        "solver": solver,
        "time_limit_seconds": time_limit_seconds,
        "offload": offload,
        "headroom": headroom,
        "gap": gap,
        "reshard": reshard,
    }
    tell("planner", f"solving for a budget of {format_bytes(budget) if isinstance(budget, int) else budget}")
    plan = _solved(profile, budget, settings)
    tell("planner", plan.in_one_line())
    return plan


def _solved(
    profile: Profile | GraphProfile | str | Path, budget: str | int, settings: dict[str, Any]
) -> Plan | GraphPlan:
    ranks = ranks_if_any()
    if ranks is None:
        return solving.solve(profile, budget, **settings)
    if isinstance(profile, str | Path):
        profile = profile_of_either_kind(profile, "solve")
    with ranks.together("solve"):
        if isinstance(profile, Profile) and profile.beside:
            return solving.solve(profile, budget, **settings)
        given = profile.fingerprint if isinstance(profile, Profile) else str(type(profile).__name__)
        ranks.check_same("solve", {"profile": given, "budget": budget})
        return ranks.made_by_first(lambda: solving.solve(profile, budget, **settings))


def ranks_if_any() -> Ranks | None:
    """The ranks that plan together; None where this process plans alone."""
    if "torch.distributed" not in sys.modules:
        return None  # Nobody has initialised a group.
    from planner.distributed.ranks import current_ranks

    return current_ranks()
