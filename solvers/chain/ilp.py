"""Integer program over the forward-backward graph of a chain: a proven optimum, or an incumbent with its bound.

Formulation: Checkmate's R, S and FREE variables on the graph that a chain implies. Time is cut into a first pass and
one phase before the backward of each stage t = L-1 .. 0. R: stage k runs in phase t without keeping, keeping an
option, or (k == t) recomputed directly before its backward. S: which boundaries and which kept options are alive as a
phase starts. FREE is eliminated: within a phase stages run in rising order and a boundary has one reader, so at the
run of stage k a boundary j < k - 1 is alive exactly if it is retained into the next phase, k - 1 because it is read,
and j >= k if it was alive as the phase began. Two programs share these variables:

* ``sweep``: exact bytes of every schedule whose phases run stages in rising order, each at most once (Checkmate's
  frontier-advancing schedules). Contains all persistent schedules and more.
* ``bound``: only what holds in whatever order and however often stages run in a phase: kept options and boundaries
  that are there at both ends of the phase, and everything at the starts of phases and at backwards. Every schedule
  of the chain is feasible in it at no greater cost, so its optimum bounds them all.

Guarantee: ``bound`` is solved first; where its answer, replayed, fits, it is the optimum over all schedules. Otherwise
the answer is that of ``sweep``, with the bound of ``bound``; the two differ only where transients outweigh what they
make room for. Complexity: O(L^2 K) binaries for menus of K options, exponential time.
Units: bytes and seconds; inside the program both are scaled, so that HiGHS's tolerances stay below one byte.

Paper: Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization" (2020), section 4.
"""

from __future__ import annotations

import math
import time

from solvers.chain.ilp_model import ChainModel
from solvers.problem.chain_schedule import Schedule
from solvers.problem.chain_simulator import replay
from solvers.problem.number_checks import check_size
from solvers.problem.solution import Candidate, Problem

MOST_STAGES = 100  # rows grow with L^2 and terms with L^3: beyond, building the program takes minutes
_TOLERANCE = 1e-8  # a bound this close to the schedule's seconds is HiGHS's own rounding


def solve(problem: Problem, time_limit_seconds: float = 60.0) -> Candidate:
    """The fastest schedule found within the time limit, and a bound on every schedule within the budget.

    The bound is infinite where no schedule exists. Tensors that stages share are left out: give a chain
    ``folded()`` for schedules that fit, or without them for a bound.

    Raises:
        ValueError: the chain is too long for the program to be built.

    >>> from solvers.problem.examples import equal_stages
    >>> solve(Problem(chain=equal_stages(3), budget_bytes=8)).lower_bound_seconds
    11.0
    """
    check_size("ilp", len(problem.chain.stages), MOST_STAGES, "stages", "rotor")
    if problem.budget_bytes < problem.chain.optimizer_peak_bytes or problem.budget_bytes <= 0:
        return Candidate(schedule=None, lower_bound_seconds=math.inf)
    deadline = time.monotonic() + time_limit_seconds
    loose = ChainModel(problem, sweep=False).solve(time_limit_seconds / 2)
    schedule, bound_seconds = loose.schedule, loose.lower_bound_seconds
    if bound_seconds < math.inf and not _fits(problem, schedule):
        schedule = ChainModel(problem, sweep=True).solve(max(0.1, deadline - time.monotonic())).schedule
    if schedule is None or not _fits(problem, schedule):
        return Candidate(schedule=None, lower_bound_seconds=bound_seconds)
    seconds = replay(problem.chain, schedule).seconds
    return Candidate(
        schedule=schedule, lower_bound_seconds=seconds if bound_seconds >= seconds * (1 - _TOLERANCE) else bound_seconds
    )


def _fits(problem: Problem, schedule: Schedule | None) -> bool:
    return schedule is not None and replay(problem.chain, schedule).peak_bytes <= problem.budget_bytes
