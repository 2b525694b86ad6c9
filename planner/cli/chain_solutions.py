"""Chain problems at the command line: solved, and the solution written to a file and read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.cli.solution_summary import SolutionSummary, StageSummary, summary_from, summary_of_solution
from planner.plans.offload_request import Offload, usable_link
from planner.plans.offloadable import sent_bytes
from planner.plans.plan import StageDecision
from planner.plans.problem_files import chain_from
from planner.plans.solving import feasible_solution, solver_for
from planner.units import parse_bytes
from solvers import Chain, Problem, Replay, Schedule, Solution, replay
from solvers.chain.baselines import keep_all_replay
from solvers.problem.chain import RUNS

SOLUTION_FORMAT = "planner-chain-solution"
SOLUTION_VERSION = 1


def solve_chain_problem(
    chain: Chain, budget: str, *, solver: str, time_limit_seconds: float | None, offload: Offload
) -> tuple[SolutionSummary, Schedule]:
    """Solve a chain for ``budget``; the summary of its solution, and the schedule.

    Raises:
        Infeasible: nothing fits.
        ValueError: unknown solver, or a budget that does not parse.
    """
    unplanned = keep_all_replay(chain)
    budget_bytes = parse_bytes(budget, whole_bytes=unplanned.peak_bytes)
    link, why_no_link = usable_link(offload, chain, None)
    problem = Problem(chain=chain, budget_bytes=budget_bytes, link=link)
    solution = feasible_solution(problem, solver_for(offload, solver), time_limit_seconds)
    assert solution.schedule is not None
    return _summary(problem, solution, solution.schedule, unplanned, why_no_link), solution.schedule


def solution_file(summary: SolutionSummary, chain: Chain, schedule: Schedule) -> dict[str, Any]:
    """What ``solve -o`` writes for a chain: the summary, the chain, and the schedule.

    One ``[kind, stage, option]`` per action.
    """
    solved = {"chain": chain.to_dict(), "schedule": schedule.to_list()}
    return {"format": SOLUTION_FORMAT, "version": SOLUTION_VERSION, **summary.to_document(), **solved}


def chain_summary(document: Mapping[str, Any], where: str) -> SolutionSummary:
    """The summary in a chain's solution file; ``where`` names the file in errors.

    Raises:
        ValueError: a field is missing, unknown, or of another kind.
    """
    summary = summary_from(document, where)
    for number, stage in enumerate(summary.stages):
        if stage.kind is None or stage.kept_bytes is None:
            raise ValueError(f"{where}: expected fields kind and kept_bytes of stage {number}, got none; solve again")
    return summary


def solved_chain(document: Mapping[str, Any], where: str) -> tuple[Chain, Schedule]:
    """The chain and the schedule in a chain's solution file; ``where`` names the file in errors.

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
    return chain_from(document["chain"], where), Schedule.from_list(schedule)


def _summary(
    problem: Problem, solution: Solution[Schedule], schedule: Schedule, unplanned: Replay, why_no_link: str
) -> SolutionSummary:
    chain = problem.chain
    replayed = replay(chain, schedule, problem.link)
    summary = summary_of_solution(
        solution,
        replayed,
        unplanned,
        budget_bytes=problem.budget_bytes,
        resident_bytes=chain.resident_bytes,
        stages=_stage_summaries(chain, schedule, replayed),
    )
    return replace(
        summary,
        host_bytes=replayed.host_peak_bytes,
        stall_seconds=replayed.stall_seconds,
        no_offload=why_no_link,
        link=problem.link,
    )


def _stage_summaries(chain: Chain, schedule: Schedule, replayed: Replay) -> tuple[StageSummary, ...]:
    runs = [0] * len(chain.stages)
    extra_seconds = [0.0] * len(chain.stages)
    for moment in replayed.timeline:
        if moment.action.kind in RUNS:
            k = moment.action.stage
            extra_seconds[k] += moment.seconds - moment.stall_seconds if runs[k] else 0.0
            runs[k] += 1
    kept, freed = _first_pass(schedule)
    offloaded_bytes = sent_bytes(chain, schedule)
    return tuple(
        StageSummary(
            name=stage.name,
            kind="stage",
            decision="offload" if k in kept and offloaded_bytes[k] else _decision(k, kept, freed),
            kept_bytes=_kept_bytes(chain, k, kept, freed),
            runs=runs[k],
            extra_seconds=extra_seconds[k],
            offloaded_bytes=offloaded_bytes[k],
        )
        for k, stage in enumerate(chain.stages)
    )


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


def _decision(k: int, kept: Mapping[int, int], freed: set[int]) -> StageDecision:
    if k in kept:
        return "keep"
    return "segment" if k - 1 in freed else "recompute"


def _kept_bytes(chain: Chain, k: int, kept: Mapping[int, int], freed: set[int]) -> int:
    if k in kept:
        return max(0, chain.stages[k].options[kept[k]].kept_bytes)
    return chain.stages[k - 1].boundary_bytes if k > 0 and k - 1 not in freed else 0
