"""Solving on several ranks: the first one solves, and all have its plan. Loads no torch by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.plans import solving
from planner.plans.given_sources import given_profile
from planner.plans.offload_request import Offload, OffloadMode
from planner.plans.plan import Plan
from planner.plans.solving import Numerics, Reshard
from planner.units import format_bytes
from profiler.progress import tell
from profiler.records import Profile

if TYPE_CHECKING:
    from planner.distributed.ranks import Ranks


def solve(
    profile: Profile | str | Path,
    budget: str | int,
    *,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    offload: Offload | OffloadMode = "auto",
    headroom: str | int = 0,
    reshard: Reshard = "profiled",
    numerics: Numerics = "eager",
) -> Plan:
    """Choose what to keep, recompute and offload so that the step's true peak stays within ``budget``.

    Where ``torch.distributed`` is initialised for several ranks, all of them call this: the first one solves, and all
    get its plan. The budget is that of each device, and the predicted peak that of the worst rank. In a pipeline each
    rank solves for its own stage, and gets its own plan.

    Args:
        profile: a Profile, or the path of its file.
        budget: bytes, ``"8GiB"``, ``"512MiB"`` or ``"70%"`` of the unplanned peak.
        solver: a name of ``solvers.solver_names()``.
        time_limit_seconds: for solvers that search, and the programs of captured stages.
        offload: ``"auto"`` (where the profile has a link to host memory), ``"never"``, ``"only"``, or an ``Offload``
            that says how fast the link is and how much the host may hold.
        headroom: of the budget, what is left to the device's allocator: bytes, or ``"5%"`` of the budget.
        reshard: of stages that are units of ``fully_shard``, whether they give their parameters back after forward:
            ``"profiled"``, as they did then, or ``"solve"``: some may keep them, for one gather less.
        numerics: ``"eager"``, the very bits of the step without a plan; or ``"compiled"``: stages whose captured ops
            round otherwise than their own code (``MenuRecord.opaque`` says so) may run as programs, too; or
            ``"rounding"``: beside that the head and the loss may run in pieces, where the profile was made so.

    Returns:
        The plan, replayed in exact bytes, with its bound.

    Raises:
        Infeasible: no plan of stages was found; its status says whether it is proven that none fits, and it carries
            the smallest budget known to be enough. On all ranks.
        NothingFound: no plan was found, and nothing is proven. On all ranks.
        RankError: one rank failed, or ranks gave different profiles or budgets.
        ValueError: no profile, unknown solver, a budget or headroom that does not parse, or offloading demanded where
            nothing can be sent.
    """
    settings: dict[str, Any] = {
        "solver": solver,
        "time_limit_seconds": time_limit_seconds,
        "offload": offload,
        "headroom": headroom,
        "reshard": reshard,
        "numerics": numerics,
    }
    tell("planner", f"solving for a budget of {format_bytes(budget) if isinstance(budget, int) else budget}")
    plan = _solved(profile, budget, settings)
    tell("planner", plan.in_one_line())
    return plan


def _solved(profile: Profile | str | Path, budget: str | int, settings: dict[str, Any]) -> Plan:
    ranks = ranks_if_any()
    if ranks is None:
        return solving.solve(profile, budget, **settings)
    profile = given_profile(profile, "solve")
    with ranks.together("solve"):
        if profile.in_flight:
            return solving.solve(profile, budget, **settings)
        ranks.check_same("solve", {"profile": profile.fingerprint, "budget": budget})
        return ranks.made_by_rank0(lambda: solving.solve(profile, budget, **settings))


def ranks_if_any() -> Ranks | None:
    """The ranks that plan together; None where this process plans alone."""
    if "torch.distributed" not in sys.modules:
        return None  # Nobody has initialised a group.
    from planner.distributed.ranks import current_ranks

    return current_ranks()
