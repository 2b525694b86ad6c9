"""Solving what FILE may be at the command line: a profile, a chain problem or a graph problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.cli import chain_solutions, documents, graph_solutions
from planner.plans.offload_request import Offload
from planner.plans.problem_files import Source
from planner.plans.rules import Rules
from planner.plans.solving import NoPlan, solve
from planner.plans.stated_plan import state
from profiler.records import Profile
from solvers.problem.chain import Chain
from solvers.problem.graph import Graph


def stage_level(source: Source, rules: Rules | None) -> Profile:
    """The profile without options inside stages; ValueError for a problem file, or with rules, which may name some."""
    if isinstance(source, Profile) and rules is None:
        return source.stage_level()
    kind = "rules" if rules is not None else "a problem file"
    raise ValueError(f"--no-menus: expected a profile alone, got {kind}; leave one of them out")


def solve_source(
    source: Source,
    budget: str | None,
    *,
    solver: str,
    time_limit_seconds: float | None,
    gap: float | None,
    rules: Rules | None = None,
    offload: Offload | None = None,
    headroom: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document of a solution, and the one to save.

    Args:
        source: the profile, chain or graph.
        budget: as text; None with rules that need none.
        solver, time_limit_seconds, gap: as at the command line.
        rules: what is stated of a profile's stages by hand.
        offload: whether and over what activations may go to host memory; None where nothing was said of it.
        headroom: of the budget, left to the device's allocator; None where nothing was said of it.

    Raises:
        NoPlan: no schedule came out.
        ValueError: a solver or an option that this kind of problem does not have, or a budget that does not parse.
    """
    if rules is not None and not isinstance(source, Profile):
        raise ValueError(
            "--rules: expected a profile, whose stages have names, got a problem file; make one with planner profile"
        )
    if offload is not None and (rules is not None or isinstance(source, Graph)):
        kind = "rules" if rules is not None else "a graph problem"
        raise ValueError(f"--link-gbps and the like: expected a profile or a chain alone, got {kind}; leave them out")
    if headroom is not None and not isinstance(source, Profile):
        raise ValueError(
            "--headroom: expected a profile, whose device has an allocator, got a problem file; lower the budget"
        )
    if isinstance(source, Graph):
        document, actions = graph_solutions.solve_graph_document(
            source, _given(budget), solver=solver, time_limit_seconds=time_limit_seconds, gap=gap
        )
        return document, graph_solutions.solution_file(document, source, actions)
    if gap is not None:
        kind = "a profile" if isinstance(source, Profile) else "a chain problem"
        raise ValueError(f"--gap: expected a graph problem, whose solvers search until then, got {kind}; leave it out")
    if isinstance(source, Profile) and rules is not None:
        plan = state(
            source,
            rules,
            budget=budget,
            solver=solver,
            time_limit_seconds=time_limit_seconds,
            headroom=headroom or 0,
        )
        return documents.plan_document(plan), plan.to_document()
    if isinstance(source, Profile):
        offload_request = offload or Offload()
        plan = solve(
            source,
            _given(budget),
            solver=solver,
            time_limit_seconds=time_limit_seconds,
            offload=offload_request,
            headroom=headroom or 0,
        )
        return documents.plan_document(plan), plan.to_document()
    document, schedule = chain_solutions.solve_chain_document(
        source, _given(budget), solver=solver, time_limit_seconds=time_limit_seconds, offload=offload or Offload()
    )
    return document, chain_solutions.solution_file(document, source, schedule)


def _given(budget: str | None) -> str:
    if budget is None:
        raise ValueError(
            "--budget: expected one, got none; give for example 8GiB or 70% (with --rules it may be left out)"
        )
    return budget


def refusal_of(refusal: NoPlan, source: Source) -> dict[str, Any]:
    """What ``solve --json`` says where no schedule came out."""
    if isinstance(source, Graph):
        return graph_solutions.graph_refusal(refusal, source)
    if isinstance(source, Chain):
        return chain_solutions.chain_refusal(refusal, source)
    return documents.profile_refusal(refusal, source)


def title_of(source: Source, path: Path) -> str:
    """What a picture of it is headed with."""
    if isinstance(source, Profile):
        return f"{source.model_class} on {source.device} ({source.device_name})"
    if isinstance(source, Graph):
        return f"{path.stem}: a graph of {len(source.nodes)} nodes"
    return f"{path.stem}: a chain of {len(source.stages)} stages"
