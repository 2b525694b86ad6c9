"""Solves the profile of a graph for a budget: the plan with its certificate, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from planner.plans.graph_plan import GraphPlan
from planner.plans.refusals import Infeasible, NoPlan, NothingFound, require_schedule
from planner.steps.copy_candidates import candidates_of, sets_to_send
from planner.steps.copy_clock import CopyTimes, StepSeconds, copy_times
from planner.steps.copy_placement import CopyPlacement, absences_between_uses
from planner.steps.graph_problem import StatedDecision, StepProblem, StepSurroundings, step_problem
from profiler.graph_profile import GraphProfile
from profiler.step_graph import StepGraph
from profiler.step_replay import StepCopy, StepRuns
from solvers.graph.incumbent import SMALLEST_GAP
from solvers.graph.liveness import IndexedGraph
from solvers.graph.lower_bound import graph_bound_seconds
from solvers.graph.registry import DEFAULT_GAP, GraphSolution, solve_graph
from solvers.problem.deadline import Deadline, check_deadline, left_seconds
from solvers.problem.link import Link
from solvers.problem.solution import GraphProblem

# Of the time that is left, for rounds of less and less room, where the replay of a plan is above what its graph says.
_ROUND_SHARES = (0.8, 0.5, 1.0)


def solve_graph_profile(
    profile: GraphProfile,
    budget_bytes: int,
    *,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    gap: float = DEFAULT_GAP,
    decisions: Mapping[int, StatedDecision] | None = None,
    link: Link | None = None,
    rerun: bool = True,
) -> GraphPlan:
    """The fastest plan of a profile's ops that is found within a budget.

    With a link plans for several sets of storages that may wait in host memory are found as well, each by the same
    method; the fastest of all is the answer, so it is never slower than without.

    Args:
        profile: of the step.
        budget_bytes: the most that may be alive at once.
        solver: a name of ``solvers.graph_solver_names()``.
        time_limit_seconds: all searches together end then: one without a link, and one for each set.
        gap: relative distance from the bound at which it ends early.
        decisions: what is stated of ops, by ordinal.
        link: over which storages may be sent; None: nothing is.
        rerun: ops may run again.

    Raises:
        Infeasible: nothing fits; carries the smallest budget known to be feasible.
        NothingFound: nothing was found, and nothing ruled out.
    """
    search = GraphSearch(solver, time_limit_seconds, gap)
    solving = _Solving(profile, budget_bytes, search, decisions or {}, link, rerun=rerun)
    plans: list[GraphPlan] = []
    refusals: list[NoPlan] = []
    sets = list(solving.sets())
    with Deadline(time_limit_seconds or math.inf) as deadline:
        for position, sent in enumerate(sets):
            if plans or refusals:
                check_deadline()
            with Deadline(deadline.left_seconds() / (len(sets) - position)):
                try:
                    plans.append(solving.plan(sent))
                except NoPlan as refusal:
                    refusals.append(refusal)
            if plans and (plans[-1].interrupted or plans[-1].predicted_seconds <= profile.once_seconds * (1 + gap)):
                break
    if not plans:
        raise _of_all(refusals)
    best = min(plans, key=lambda plan: plan.predicted_seconds)
    return replace(best, interrupted=plans[-1].interrupted)


def _of_all(refusals: Sequence[NoPlan]) -> NoPlan:
    """The smallest budget of any; proven only where all are, since what one set cannot reach another one may."""
    least = min(refusals, key=lambda refusal: refusal.minimum_budget_bytes)
    unproven = [refusal for refusal in refusals if isinstance(refusal, NothingFound)]
    if not unproven:
        return least
    open_one = min(unproven, key=lambda refusal: refusal.lower_bound_seconds or 0.0)
    return replace(open_one, minimum_budget_bytes=least.minimum_budget_bytes, reason=least.reason)


def smallest_sendable(profile: GraphProfile) -> int | None:
    """Bytes of the smallest result that may be sent to host memory; None where none may."""
    candidates = candidates_of(profile.graph, StepSurroundings.of(profile))
    return min((each.size_bytes for each in candidates), default=None)


class GraphSearch(NamedTuple):
    """How orders are searched for: by which method, until when, and how near to the bound."""

    solver: str = "auto"
    time_limit_seconds: float | None = None
    gap: float = DEFAULT_GAP


class FoundOrder(NamedTuple):
    """An order of a step's ops within a budget.

    Attributes:
        solution: that it was made from.
        runs, copies: it.
        peak_bytes: of the step, by its replay.
    """

    solution: GraphSolution
    runs: StepRuns
    copies: tuple[StepCopy, ...]
    peak_bytes: int


class _Copies(Protocol):
    """The copies that a schedule asks for."""

    def __call__(self, problem: StepProblem, solution: GraphSolution, runs: StepRuns) -> tuple[StepCopy, ...]: ...


def _no_copies(problem: StepProblem, solution: GraphSolution, runs: StepRuns) -> tuple[StepCopy, ...]:
    return ()


def order_within(
    budget_bytes: int,
    step: StepGraph,
    around: StepSurroundings,
    problem: StepProblem,
    search: GraphSearch,
    copies_of: _Copies = _no_copies,
) -> FoundOrder:
    """The fastest order of a step's ops that is found within a budget; raises as ``solve_graph_profile``.

    Where the replay of an order is above the budget, the next one is found in less room; what is proven stays what
    was proven of the whole budget.
    """
    if budget_bytes < around.other_peak_bytes:
        raise _too_little_around(problem, around.other_peak_bytes, budget_bytes, search.solver)
    least_bytes, room_bytes, bound_seconds = 0, budget_bytes, math.inf
    for share in _ROUND_SHARES:
        with Deadline(left_seconds() * share):
            solution = solve_graph(GraphProblem(graph=problem.graph, budget_bytes=room_bytes), *search)
        if solution.schedule is None and least_bytes and not solution.interrupted:
            break
        solution = require_schedule(solution, budget_bytes, search.solver)
        if least_bytes:
            solution = with_bound(solution, bound_seconds)
        bound_seconds = solution.lower_bound_seconds
        runs = runs_of(problem, solution)
        copies = copies_of(problem, solution, runs)
        peak_bytes = around.peak_bytes(step, runs, copies)
        if peak_bytes <= budget_bytes:
            return FoundOrder(solution, runs, copies, peak_bytes)
        if solution.interrupted:
            raise KeyboardInterrupt
        least_bytes = min(least_bytes or peak_bytes, peak_bytes)
        room_bytes -= peak_bytes - budget_bytes
    raise NothingFound(
        minimum_budget_bytes=least_bytes,
        reason="the orders that were found hand over what forward returns and nobody holds",
        solver=search.solver,
        budget_bytes=budget_bytes,
    )


def solution_within(problem: StepProblem, solution: GraphSolution, budget_bytes: int) -> GraphSolution:
    """A solution with the claims that hold within a budget above its own peak: more fits there, and may be faster."""
    assert solution.peak_bytes is not None
    if budget_bytes <= solution.peak_bytes:
        return solution
    return with_bound(solution, graph_bound_seconds(IndexedGraph(problem.graph), budget_bytes))


def with_bound(solution: GraphSolution, bound_seconds: float) -> GraphSolution:
    """A solution with a bound that was proven elsewhere; optimal where it meets that."""
    assert solution.seconds is not None
    bound_seconds = min(bound_seconds, solution.seconds)
    optimal = solution.seconds - bound_seconds <= SMALLEST_GAP * solution.seconds
    return replace(solution, lower_bound_seconds=bound_seconds, status="optimal" if optimal else "feasible")


class _Solving:
    """Solves a profile for a budget with several sets of storages that may be sent."""

    def __init__(
        self,
        profile: GraphProfile,
        budget_bytes: int,
        search: GraphSearch,
        decisions: Mapping[int, StatedDecision],
        link: Link | None,
        *,
        rerun: bool,
    ) -> None:
        self._profile, self._step, self._budget_bytes = profile, profile.graph, budget_bytes
        self._search, self._decisions = search, decisions
        self._link, self._rerun = link, rerun
        self._around = StepSurroundings.of(profile)
        self._seconds = StepSeconds.of(profile)

    def sets(self) -> Iterator[frozenset[int]]:
        """Sets of storages that may be sent, none first."""
        yield frozenset()
        if self._link is not None:
            candidates = candidates_of(self._step, self._around)
            yield from sets_to_send(
                candidates, self._link, self._profile.forward.seconds, self._profile.backward.seconds
            )

    def plan(self, sent: frozenset[int]) -> GraphPlan:
        """The plan for a set; raises NoPlan."""
        problem = step_problem(self._step, self._around, decisions=self._decisions, sent=sent, rerun=self._rerun)
        found = order_within(self._budget_bytes, self._step, self._around, problem, self._search, self._copies)
        return self._plan_of(problem, found)

    def _copies(self, problem: StepProblem, solution: GraphSolution, runs: StepRuns) -> tuple[StepCopy, ...]:
        """The copies that a schedule asks for, in the room that the budget leaves."""
        if self._link is None or not problem.fetched:
            return ()
        absences = absences_between_uses(self._step, runs, fetches_of(problem, solution))
        placement = CopyPlacement(self._step, runs, absences, self._seconds, self._link)
        peaks = self._around.peaks(self._step, runs, placement.copies())
        placement.place([self._budget_bytes - peak_bytes for peak_bytes in peaks])
        return placement.copies()

    def _plan_of(self, problem: StepProblem, found: FoundOrder) -> GraphPlan:
        profile, solution = self._profile, found.solution
        times = CopyTimes(stall_seconds=0.0, host_peak_bytes=0)
        if self._link is not None and found.copies:
            times = copy_times(self._step, found.runs, found.copies, self._link, self._seconds)
        again = found.runs.again
        again_seconds = profile.evaluations * sum(self._step.ops[o].seconds for o in again.elements())
        stall_seconds = profile.evaluations * times.stall_seconds
        seconds = profile.once_seconds + again_seconds + stall_seconds
        bound = min(self._bound_seconds(problem, solution), seconds)
        status = solution.status if self._link is None else "optimal" if seconds <= bound else "feasible"
        assert status in ("optimal", "feasible")
        return GraphPlan(
            model_class=profile.model_class,
            target=profile.target,
            input_shapes=profile.input_shapes,
            device=profile.device,
            precision=profile.precision,
            solver=solution.solver,
            status=status,
            budget_bytes=self._budget_bytes,
            predicted_peak_bytes=found.peak_bytes,
            predicted_seconds=seconds,
            unplanned_peak_bytes=profile.unplanned_peak_bytes,
            unplanned_seconds=profile.unplanned_seconds,
            resident_bytes=profile.resident.total,
            recomputed_seconds=again_seconds,
            recomputed_ops=again.total(),
            lower_bound_seconds=bound,
            gap=(seconds - bound) / seconds if seconds > 0 else 0.0,
            solve_seconds=solution.solve_seconds,
            interrupted=solution.interrupted,
            unused_outputs=profile.unused_outputs,
            graph=profile.graph,
            around=self._around,
            runs=found.runs,
            copies=found.copies,
            link=self._link,
            host_bytes=times.host_peak_bytes,
            stall_seconds=stall_seconds,
            offload_only=not self._rerun,
        )

    def _bound_seconds(self, problem: StepProblem, solution: GraphSolution) -> float:
        """What no plan is faster than; where something may be sent, only that each op runs once."""
        if self._link is not None:
            return self._profile.once_seconds
        least_added = solution.lower_bound_seconds - problem.once_seconds
        return self._profile.once_seconds + self._profile.evaluations * max(0.0, least_added)


def _too_little_around(problem: StepProblem, needed_bytes: int, budget_bytes: int, solver: str) -> Infeasible:
    """A budget below what the step takes before its programs and after them; these may need even more."""
    reason = f"what comes before forward and after backward, such as the optimizer step, needs {needed_bytes} bytes"
    shortage = solve_graph(GraphProblem(graph=problem.graph, budget_bytes=1)).shortage
    assert shortage is not None
    if shortage.minimum_budget_bytes > needed_bytes:
        needed_bytes, reason = shortage.minimum_budget_bytes, shortage.reason
    return Infeasible(minimum_budget_bytes=needed_bytes, reason=reason, solver=solver, budget_bytes=budget_bytes)


def runs_of(problem: StepProblem, solution: GraphSolution) -> StepRuns:
    """The runs of a solution's schedule, without nodes that stand for no op."""
    turns = [*_turns(problem, solution)]
    loss = next(k for k, (name, _) in enumerate(turns) if name == problem.loss)
    forward, backward = ([k for _, ordinals in part for k in ordinals] for part in (turns[:loss], turns[loss + 1 :]))
    return StepRuns(tuple(forward), tuple(backward))


def fetches_of(problem: StepProblem, solution: GraphSolution) -> dict[int, list[int]]:
    """By storage that a schedule may bring back from host memory, before which turns it does.

    Turns count the runs of forward, the loss, and the runs of backward.
    """
    fetches = {storage: list[int]() for storages in problem.fetched.values() for storage in storages}
    turn, made = 0, set[str]()
    for name, ordinals in _turns(problem, solution):
        turn += 1 if name == problem.loss else len(ordinals)
        if name in made:
            for storage in problem.fetched.get(name, ()):
                fetches[storage].append(turn)
        made.add(name)
    return fetches


def _turns(problem: StepProblem, solution: GraphSolution) -> Iterator[tuple[str, list[int]]]:
    """The nodes of a schedule in the order of their runs, with ordinals of the ops that run."""
    assert solution.schedule is not None
    ran: set[str] = set()
    for node in solution.schedule.computed():
        name = problem.graph.nodes[node].name
        group = problem.groups.get(name)
        yield name, [] if group is None else group.ops if name in ran else group.first_run
        ran.add(name)


def first_difference(planned: StepGraph, found: StepGraph, *, sizes_differ: bool = False) -> str:
    """What differs first between the ops of a plan and those of a model, in words; empty where nothing does.

    Args:
        planned, found: both graphs.
        sizes_differ: the bytes of what ops make may be others.
    """
    for mine, other in zip(planned.ops, found.ops, strict=False):
        where = f" in {other.module}" if other.module else ""
        if (mine.name, mine.op) != (other.name, other.op):
            return f"{other.name} ({other.op}{where}) where it had {mine.name}"
        if (mine.reads, mine.makes) != (other.reads, other.makes):
            return f"{mine.name} ({mine.op}{where}) has other arguments, as where other tensors require gradients"
        sizes, made = ([graph.storages[s].traced_bytes for s in mine.makes] for graph in (planned, found))
        if sizes != made and not sizes_differ:
            return f"{mine.name} ({mine.op}{where}) makes {made} bytes, and made {sizes}"
    if len(planned.ops) != len(found.ops):
        return f"{len(found.ops)} ops, not {len(planned.ops)}"
    return ""
