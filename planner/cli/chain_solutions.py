"""Chain problem files at the command line: solved, and the solution written as a document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.cli.documents import refusal_document
from planner.plans.offload_request import Offload, link_document, link_from, usable_link
from planner.plans.offloadable import sent_bytes
from planner.plans.problem_files import chain_from
from planner.plans.solving import NoPlan, feasible_solution, solver_for
from planner.units import parse_bytes
from solvers import Chain, Problem, Replay, Schedule, Solution, replay
from solvers.chain.baselines import keep_all_replay
from solvers.problem.link import Link

SOLUTION_FORMAT = "planner-chain-solution"
SOLUTION_VERSION = 1


def solve_chain_document(
    chain: Chain, budget: str, *, solver: str, time_limit_seconds: float | None, offload: Offload
) -> tuple[dict[str, Any], Schedule]:
    """Solve a chain for ``budget``; the document of its solution (the keys of a plan's) and the schedule.

    Raises:
        Infeasible: nothing fits.
        ValueError: unknown solver, or a budget that does not parse.
    """
    whole = keep_all_replay(chain)
    budget_bytes = parse_bytes(budget, whole_bytes=whole.peak_bytes)
    link, why = usable_link(offload, chain, None)
    problem = Problem(chain=chain, budget_bytes=budget_bytes, link=link)
    solution = feasible_solution(problem, solver_for(offload, solver), time_limit_seconds)
    assert solution.schedule is not None
    return {**_document(problem, solution, solution.schedule, whole), "no_offload": why}, solution.schedule


def solution_file(document: Mapping[str, Any], chain: Chain, schedule: Schedule) -> dict[str, Any]:
    """What ``solve -o`` writes for a chain: the document (with its link), the chain, and the schedule.

    One ``[kind, stage, option]`` per action.
    """
    solved = {"chain": chain.to_dict(), "schedule": schedule.to_list()}
    return {"format": SOLUTION_FORMAT, "version": SOLUTION_VERSION, **document, **solved}


def solved_chain(document: Mapping[str, Any], where: str) -> tuple[Chain, Schedule, Link | None]:
    """The chain, the schedule and the link of a solution's document; ``where`` names it in errors.

    Raises:
        ValueError: the file is one of an older release, or spoilt.
    """
    if "chain" not in document:
        raise ValueError(
            f"{where}: expected a solution that carries the chain it was solved on, got one of an older release; "
            "solve the problem again"
        )
    schedule = document.get("schedule")
    if not isinstance(document["chain"], Mapping) or not isinstance(schedule, list):
        raise ValueError(f"{where}: expected a chain and a schedule, got others; solve again")
    try:
        link = link_from(document.get("link"))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: expected the fields of a link, got a mismatch: {error}; solve again") from error
    return chain_from(document["chain"], where), Schedule.from_list(schedule), link


def chain_refusal(refusal: NoPlan, chain: Chain) -> dict[str, Any]:
    """The refusal document of a chain problem."""
    whole = keep_all_replay(chain)
    return refusal_document(
        refusal,
        unplanned_peak_bytes=whole.peak_bytes,
        unplanned_seconds=whole.seconds,
        resident_bytes=chain.resident_bytes,
    )


def _document(problem: Problem, solution: Solution[Schedule], schedule: Schedule, whole: Replay) -> dict[str, Any]:
    chain = problem.chain
    replayed = replay(chain, schedule, problem.link)
    stages = _stage_documents(chain, schedule, replayed)
    return {
        "solver": solution.solver,
        "status": solution.status,
        "budget_bytes": problem.budget_bytes,
        "predicted_peak_bytes": replayed.peak_bytes,
        "predicted_seconds": replayed.seconds,
        "unplanned_peak_bytes": whole.peak_bytes,
        "unplanned_seconds": whole.seconds,
        "resident_bytes": chain.resident_bytes,
        "lower_bound_seconds": solution.lower_bound_seconds,
        "gap": solution.gap,
        "solve_seconds": solution.solve_seconds,
        "recomputed_seconds": sum(stage["extra_seconds"] for stage in stages),
        "link": link_document(problem.link),
        "host_bytes": replayed.host_peak_bytes,
        "stall_seconds": replayed.stall_seconds,
        "slowdown": replayed.seconds / whole.seconds if whole.seconds > 0 else 1.0,
        "stages": stages,
    }


def _stage_documents(chain: Chain, schedule: Schedule, replayed: Replay) -> list[dict[str, Any]]:
    runs = [0] * len(chain.stages)
    extra = [0.0] * len(chain.stages)
    for moment in replayed.timeline:
        if moment.action.kind in ("forward", "recompute"):
            k = moment.action.stage
            extra[k] += moment.seconds - moment.stall_seconds if runs[k] else 0.0
            runs[k] += 1
    kept, freed = _first_pass(schedule)
    sent = sent_bytes(chain, schedule)
    return [
        {
            "name": stage.name,
            "kind": "stage",
            "decision": "offload" if k in kept and sent[k] else _decision(k, kept, freed),
            "kept_bytes": _kept_bytes(chain, k, kept, freed),
            "runs": runs[k],
            "extra_seconds": extra[k],
            "offloaded_bytes": sent[k],
        }
        for k, stage in enumerate(chain.stages)
    ]


def _first_pass(schedule: Schedule) -> tuple[dict[int, int], set[int]]:
    """Until a stage runs again or goes backward: the option that each kept stage keeps, and the boundaries freed."""
    seen: set[int] = set()
    kept: dict[int, int] = {}
    freed: set[int] = set()
    for action in schedule.actions:
        if action.kind in ("backward", "recompute") or (action.kind == "forward" and action.stage in seen):
            break
        if action.kind == "free":
            freed.add(action.stage)
        if action.kind != "forward":
            continue
        seen.add(action.stage)
        if action.option is not None:
            kept[action.stage] = action.option
    return kept, freed


def _decision(k: int, kept: Mapping[int, int], freed: set[int]) -> str:
    if k in kept:
        return "keep"
    return "segment" if k - 1 in freed else "recompute"


def _kept_bytes(chain: Chain, k: int, kept: Mapping[int, int], freed: set[int]) -> int:
    if k in kept:
        return max(0, chain.stages[k].options[kept[k]].kept_bytes)
    return chain.stages[k - 1].boundary_bytes if k > 0 and k - 1 not in freed else 0
