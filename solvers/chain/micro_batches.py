"""Plans for one micro-batch while others are in flight: what those keep follows from the same plan.

A pipeline's stage goes forward with several micro-batches before the first of them goes backward. At each forward and
backward there are ``n`` others that have gone forward; each holds what the plan keeps until the forward's end, K bytes.
So a plan of one micro-batch that keeps K and peaks at P takes P and the most of ``n K`` and what else is there then.

Method: for a number of limits on K, solve the chain of one micro-batch with what so much takes of others counted as
resident, and with the limit as a peak of the last forward; the fastest plan counts. Guarantee: within the budget by
replay. Complexity: a dozen solves. The bound on seconds is that of a single micro-batch, with others that keep nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from solvers.chain.candidates import BASELINES, all_baseline_schedules, baseline_schedules, replayed
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.persistent import smallest_schedule
from solvers.chain.registry import frontier, solve_chain
from solvers.problem.chain import Chain
from solvers.problem.deadline import Deadline, check_deadline
from solvers.problem.schedule import Schedule
from solvers.problem.simulator import replay
from solvers.problem.solution import Problem, Shortage, Solution

# What is alive beside one micro-batch at some moments: how many others have gone forward and not yet backward, and the
# bytes of what else is there, gradients among it.
Beside = Sequence[tuple[int, int]]

_LIMITS = 8  # on what a micro-batch keeps: so many equal shares of what it keeps without a plan
_PROVEN = 1e-9  # relative: seconds this close to their bound are the least


def kept_until_backward(chain: Chain, schedule: Schedule) -> int:
    """Bytes that one micro-batch holds between its forward and its backward."""
    last = len(chain.stages) - 1
    forward = next(a for a in replay(chain, schedule).timeline if a.action.kind == "forward" and a.action.stage == last)
    return forward.after_bytes - chain.resident_bytes


def most_kept(chain: Chain) -> int:
    """Bytes that one micro-batch holds between forward and backward where everything is kept."""
    return max(kept_until_backward(chain, schedule) for schedule in _schedules(chain, "keep_all"))


def _schedules(chain: Chain, solver: str) -> list[Schedule]:
    return [solution.schedule for solution in frontier(chain, solver) if solution.schedule is not None]


def others_bytes(beside: Beside, kept_bytes: int) -> int:
    """The most bytes that there are beside a micro-batch, where each micro-batch keeps so many."""
    return max((count * kept_bytes + other_bytes for count, other_bytes in beside), default=0)


def with_others(chain: Chain, beside: Beside, kept_bytes: int) -> Chain:
    """The chain of one micro-batch with what is there beside it."""
    return replace(chain, resident_bytes=chain.resident_bytes + others_bytes(beside, kept_bytes))


def without_others(chain: Chain, beside: Beside, schedule: Schedule) -> Chain:
    """The chain of one micro-batch alone, of one with what others keep by a schedule."""
    more_bytes = others_bytes(beside, kept_until_backward(chain, schedule))
    return replace(chain, resident_bytes=chain.resident_bytes - more_bytes)


def with_others_unplanned(chain: Chain, beside: Beside) -> Chain:
    """The same where the others keep everything; right for whatever is kept of the one."""
    return with_others(chain, beside, most_kept(chain)) if beside else chain


def solve_beside_others(
    problem: Problem, beside: Beside, solver: str, time_limit_seconds: float | None
) -> tuple[Problem, Solution]:
    """The fastest plan that is found, and the problem in which what it keeps of others is resident.

    Args:
        problem: of one micro-batch alone; its budget is that of the whole step.
        beside: what there is beside it.
        solver: as for ``solve_chain``.
        time_limit_seconds: of all solves together.
    """
    alone, budget_bytes = problem.chain, problem.budget_bytes
    simple = [*_schedules(alone, "keep_all"), *_schedules(alone, "recompute_all"), *_smallest(alone, solver)]
    found = [
        Solution(solver=solver, status="feasible", schedule=schedule, lower_bound_seconds=0, solve_seconds=0)
        for schedule in simple
    ]
    limits = _limits(alone, simple)
    with Deadline(time_limit_seconds or math.inf) as deadline:
        for position, kept_bytes in enumerate(limits):
            limited = _limited(with_others(alone, beside, kept_bytes), budget_bytes, kept_bytes)
            if limited is not None:
                share = None if time_limit_seconds is None else deadline.left_seconds() / (len(limits) - position)
                check_deadline()
                found.append(solve_chain(replace(problem, chain=limited, link=None), solver, share))
                if found[-1].interrupted:
                    break
    replayed = []
    for solution in found:
        if solution.schedule is not None:
            chain = with_others(alone, beside, kept_until_backward(alone, solution.schedule))
            replayed.append((solution, chain, replay(chain, solution.schedule)))
    spent_seconds = sum(solution.solve_seconds for solution in found)
    bound = bound_seconds(with_others(alone, beside, 0), budget_bytes)
    fitting = [each for each in replayed if each[2].peak_bytes <= budget_bytes]
    if not fitting:
        _, chain, least = min(replayed, key=lambda each: each[2].peak_bytes)
        optimizer = least.peak_bytes == chain.optimizer_peak_bytes
        moment = least.peak_moment.action
        shortage = Shortage(
            minimum_budget_bytes=least.peak_bytes,
            stage=chain.stages[moment.stage].name,
            moment="optimizer" if optimizer else moment.kind,
        )
        if found[-1].interrupted:
            raise KeyboardInterrupt
        return replace(problem, chain=chain), Solution(
            solver=solver,
            status="infeasible" if bound == math.inf else "unknown",
            lower_bound_seconds=bound_seconds(with_others(alone, beside, 0), least.peak_bytes),  # finite
            solve_seconds=spent_seconds,
            shortage=shortage,
        )
    solution, chain, best = min(fitting, key=lambda each: (each[2].seconds, each[2].peak_bytes))
    return replace(problem, chain=chain), replace(
        solution,
        status="optimal" if best.seconds <= bound * (1 + _PROVEN) else "feasible",
        peak_bytes=best.peak_bytes,
        seconds=best.seconds,
        lower_bound_seconds=min(bound, best.seconds),
        solve_seconds=spent_seconds,
        interrupted=found[-1].interrupted,
    )


def _smallest(alone: Chain, solver: str) -> Iterator[Schedule]:
    """The solver's schedule with the smallest peak of one micro-batch by itself."""
    known = [] if solver in BASELINES else [replayed(alone, solver, smallest_schedule(alone))]
    known += baseline_schedules(alone, solver) if solver in BASELINES else []
    known += all_baseline_schedules(alone) if solver == "auto" else []
    yield min(known, key=lambda each: each.peak_bytes).schedule


def _limits(alone: Chain, schedules: Sequence[Schedule]) -> list[int]:
    """Bytes that a micro-batch may keep; those of simple schedules among them."""
    kept = {kept_until_backward(alone, schedule) for schedule in schedules}
    most = max(kept)
    return sorted(kept | {most * share // _LIMITS for share in range(1, _LIMITS + 1)})


def _limited(chain: Chain, budget_bytes: int, kept_bytes: int) -> Chain | None:
    """The chain whose last forward fits the budget only where no more than that is kept; None where nothing fits."""
    free_bytes = budget_bytes - chain.resident_bytes - kept_bytes
    if free_bytes < 0:
        return None
    *before, last = chain.stages

    def peak(own_bytes: int, growth_bytes: int) -> int:
        return max(own_bytes, growth_bytes + free_bytes)

    options = tuple(
        replace(o, forward_peak_bytes=peak(o.forward_peak_bytes, last.boundary_bytes + o.kept_bytes))
        for o in last.options
    )
    dropped_bytes = peak(last.forward_peak_bytes, last.boundary_bytes + last.residue_bytes)
    return replace(chain, stages=(*before, replace(last, options=options, forward_peak_bytes=dropped_bytes)))
