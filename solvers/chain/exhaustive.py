"""Exhaustive search for chains of a few stages: a shortest path over every state that a schedule can be in.

Formulation: a state is the set of boundaries and residues alive, what is kept of each stage, how far the first pass
has come and which stage goes backward next; every action of the simulator's rules that stays within the budget is an
edge of its seconds; Dijkstra's algorithm from nothing run to everything backward.
Guarantee: the fastest of all schedules, persistent or not; no schedule means that there is none.
Complexity: exponential, about (4 + options)^L states for L stages. Units: bytes and seconds.
Paper: Dijkstra, "A note on two problems in connexion with graphs" (1959).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from solvers.problem.chain import Chain, Shared
from solvers.problem.deadline import check_deadline
from solvers.problem.plain_data import check_size
from solvers.problem.schedule import Action, Schedule
from solvers.problem.solution import Candidate, Problem

MOST_STAGES = 6


class SearchState(NamedTuple):
    alive: frozenset[int]  # boundaries
    kept: tuple[int, ...]  # option of each stage, -1 where nothing is kept
    residues: frozenset[int]
    reached: int
    pending: int


class Edge(NamedTuple):
    state: SearchState
    action: Action
    seconds: float
    peak_bytes: int  # while the action runs, above the bytes alive before it
    before: SearchState


def solve(problem: Problem) -> Candidate:
    """The fastest schedule within the budget, or none.

    Raises:
        ValueError: the chain has more stages than can be searched.

    >>> from solvers.problem.examples import equal_stages
    >>> chain = equal_stages(3)
    >>> [solve(Problem(chain=chain, budget_bytes=b)).lower_bound_seconds for b in (6, 8, 16)]
    [13, 11, 9]
    """
    chain = problem.chain
    check_size("exhaustive", len(chain.stages), MOST_STAGES, "stages", "rotor or ilp")
    if chain.optimizer_peak_bytes > problem.budget_bytes:
        return Candidate(schedule=None, lower_bound_seconds=math.inf)
    stages = len(chain.stages)
    return _search(chain, SearchState(frozenset(), (-1,) * stages, frozenset(), -1, stages - 1), problem.budget_bytes)


_Path = tuple[Action, "_Path"] | None  # the last action, and the path before it


def _search(chain: Chain, start: SearchState, budget_bytes: int) -> Candidate:
    tie = count()
    queue: list[tuple[float, int, SearchState, _Path]] = [(0, next(tie), start, None)]
    done: set[SearchState] = set()
    while queue:
        check_deadline()
        seconds, _, state, path = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state.pending < 0:
            return Candidate(schedule=_schedule_of(path), lower_bound_seconds=seconds)
        for edge in edges_from(chain, state):
            if edge.state not in done and _fits(chain, edge, budget_bytes):
                heapq.heappush(queue, (seconds + edge.seconds, next(tie), edge.state, (edge.action, path)))
    return Candidate(schedule=None, lower_bound_seconds=math.inf)


def _schedule_of(path: _Path) -> Schedule:
    actions: list[Action] = []
    while path is not None:
        action, path = path
        actions.append(action)
    return Schedule(actions=tuple(reversed(actions)))


def _fits(chain: Chain, edge: Edge, budget_bytes: int) -> bool:
    before = live_bytes(chain, edge.before)
    peak_bytes = before + edge.peak_bytes + _held_on_bytes(chain, edge)
    return max(peak_bytes, live_bytes(chain, edge.state)) <= budget_bytes


def _held_on_bytes(chain: Chain, edge: Edge) -> int:
    """Shared bytes that the unplanned action lets go of before its peak, and that something holds on."""
    after, before = edge.state, edge.before
    total = 0
    for tensor in chain.shared:
        forward = tensor.forward_death_is_early and before.reached < tensor.forward_death == after.reached
        forward = forward and not (edge.action.option is None and tensor.forward_death in tensor.readers)
        backward = edge.action.kind == "backward" and edge.action.stage == tensor.early_backward_death
        if (forward or backward) and _holds(tensor, after):
            total += tensor.size_bytes
    return total


def live_bytes(chain: Chain, state: SearchState) -> int:
    stages = chain.stages
    total = chain.resident_bytes + sum(stages[k].residue_bytes for k in state.residues)
    total += sum(stages[k].boundary_bytes for k in state.alive)
    for k, o in enumerate(state.kept):
        if o >= 0:
            option = stages[k].options[o]
            total += option.kept_bytes + (option.kept_output_bytes if k not in state.alive else 0)
    total += sum(stages[k].parameter_gradient_bytes for k in range(state.pending + 1, len(stages)))
    total += sum(tensor.size_bytes for tensor in chain.shared if _holds(tensor, state))
    loss_done = state.reached + 1 == len(stages)
    return total + (stages[state.pending].gradient_bytes if loss_done and state.pending >= 0 else 0)


def _holds(tensor: Shared, state: SearchState) -> bool:
    if state.pending < 0 or state.reached < tensor.born:
        return False
    waiting = {k for k in range(min(state.reached, state.pending) + 1) if state.kept[k] < 0}
    held = state.reached < tensor.forward_death or any(state.kept[k] >= 0 for k in tensor.savers)
    held = held or bool(waiting & set(tensor.readers))
    held = held or any(k - 1 in state.alive for k in waiting & set(tensor.linked_readers))
    loss_done = state.reached + 1 == len(state.kept)
    return held or (loss_done and tensor.held_until is not None and state.pending >= tensor.held_until)


def edges_from(chain: Chain, state: SearchState) -> Iterator[Edge]:
    for k in range(min(state.reached + 1, state.pending) + 1):
        if state.kept[k] < 0 and (k == 0 or k - 1 in state.alive):
            yield from _forwards(chain, state, k)
    if state.reached + 1 == len(chain.stages):
        yield from _pending_edges(chain, state)
    for k in state.alive:
        if _may_free(chain, state, k):
            after = state._replace(alive=state.alive - {k})
            yield Edge(after, Action("free", k), 0, 0, state)


def _forwards(chain: Chain, state: SearchState, k: int) -> Iterator[Edge]:
    stage, first = chain.stages[k], k == state.reached + 1
    ran = state._replace(alive=state.alive | {k}, reached=max(state.reached, k))
    if stage.recomputable:
        residues = state.residues | {k} if first else state.residues
        after = ran._replace(residues=residues)
        yield Edge(after, Action("forward", k), stage.forward_seconds, stage.forward_peak_bytes, state)
    if stage.recomputable or first:
        for o, option in enumerate(stage.options):
            after = _keeping(ran, k, o)
            seconds = option.forward_seconds if first else option.rerun_seconds
            yield Edge(after, Action("forward", k, o), seconds, option.forward_peak_bytes, state)


def _pending_edges(chain: Chain, state: SearchState) -> Iterator[Edge]:
    """The next backward, and the recomputation directly before it."""
    k = state.pending
    stage = chain.stages[k]
    if k > 0 and k - 1 not in state.alive:
        return
    if state.kept[k] >= 0:
        option = stage.options[state.kept[k]]
        after = _keeping(state, k, -1)._replace(pending=k - 1)
        yield Edge(after, Action("backward", k), option.backward_seconds, option.backward_peak_bytes, state)
    elif stage.recomputable:
        before = state._replace(residues=state.residues - {k})
        for o, option in enumerate(stage.options):
            after = _keeping(state, k, o)
            action = Action("recompute", k, o)
            yield Edge(after, action, option.recompute_seconds, option.recompute_peak_bytes, before)


def _keeping(state: SearchState, k: int, o: int) -> SearchState:
    kept = (*state.kept[:k], o, *state.kept[k + 1 :])
    return state._replace(kept=kept, residues=state.residues - {k})


def _may_free(chain: Chain, state: SearchState, k: int) -> bool:
    reader = k + 1
    if reader > state.pending:
        return True
    return state.kept[reader] < 0 and chain.stages[reader].linked and reader <= state.reached
