"""Programs of a captured call that keep less for backward and recompute more of its ops, found by the graph solver: a
menu of them, those for exactly the room that a plan leaves, and the least that any program costs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.plans.refusals import Infeasible, require_schedule
from planner.step_problem import StepProblem, StepSurroundings, problem_of_call
from profiler.program_replay import CallReplay, call_replay
from profiler.records import MenuRecord, Profile
from profiler.step_graph import StepGraph, StepRuns, replay_step, runs_once, without_unread_runs
from solvers import Chain, Problem, Schedule, replay
from solvers.chain.lower_bound import bound_seconds
from solvers.graph.registry import solve_graph
from solvers.highs import Program
from solvers.problem.chain import Option
from solvers.problem.deadline import Deadline, left_seconds
from solvers.problem.schedule import RUNS
from solvers.problem.simulator import ReplayedAction
from solvers.problem.solution import Solution

_MENU_SECONDS = 1.5  # for all searches of a menu together
_LEVELS = 6  # of kept bytes, from the least to all, that programs are searched for
_MIDDLES = 2  # of the widest gaps in bytes and seconds between these
_PEAK_LEVELS = 3  # of the memory that a program may take while it runs, besides what each op once takes
_MOST_ROOMS = 4  # of stages of one kind that programs are searched for at a time


class CallRoom(NamedTuple):
    """The most that a program may take, as the replay of the call counts.

    Attributes:
        forward_peak_bytes: while its forward runs.
        between_bytes: between forward and backward: what it hands over and returns.
        backward_peak_bytes: while its backward runs.
    """

    forward_peak_bytes: int
    between_bytes: int
    backward_peak_bytes: int


def program_menu(step: StepGraph) -> tuple[CallReplay, ...]:
    """The programs of a call that no other one beats in bytes and seconds; the fastest, which keeps most, first."""
    once = call_replay(step, runs_once(step))
    once_bytes = max(once.forward_peak_bytes, once.backward_peak_bytes)
    most_bytes = once.kept_bytes + _returned_bytes(step)
    seconds = _MENU_SECONDS / (_LEVELS + _MIDDLES + _PEAK_LEVELS + 2)  # for each
    beside_bytes = 2 * once_bytes  # between forward and backward: so much that nothing else decides
    least_bytes = min(most_bytes, _least_peak(step, seconds, between_bytes=beside_bytes) - beside_bytes)
    found = {CallRoom(once_bytes, most_bytes, once_bytes): once}

    def look(room: CallRoom) -> None:
        if room not in found and (runs := _runs_within(step, room, seconds)) is not None:
            found[room] = call_replay(step, runs)

    for level in range(_LEVELS):
        look(CallRoom(once_bytes, least_bytes + (most_bytes - least_bytes) * level // _LEVELS, once_bytes))
    for _ in range(_MIDDLES if len(found) > 1 else 0):
        look(CallRoom(once_bytes, _middle_of_widest(found), once_bytes))
    least_peak_bytes = _least_peak(step, seconds)
    for level in range(_PEAK_LEVELS):
        peak_bytes = least_peak_bytes + (once_bytes - least_peak_bytes) * level // _PEAK_LEVELS
        look(CallRoom(peak_bytes, peak_bytes, peak_bytes))
    return _unbeaten(found.values())


def _middle_of_widest(found: Mapping[CallRoom, CallReplay]) -> int:
    """The bytes in the middle of the two neighbours between which there may be most to gain: in bytes times seconds."""
    levels = sorted((room.between_bytes, choice.seconds) for room, choice in found.items())
    lower, upper = max(pairwise(levels), key=lambda pair: (pair[1][0] - pair[0][0]) * (pair[0][1] - pair[1][1]))
    return (lower[0] + upper[0]) // 2


def with_exact_programs(profile: Profile, problem: Problem, schedule: Schedule, seconds: float) -> Profile:
    """The profile with programs for exactly the room that a schedule leaves each stage; the same where none is new.

    Args:
        profile: of the stages.
        problem: its chain, and the budget.
        schedule: of the chain, within the budget.
        seconds: for all searches together.
    """
    rooms: dict[tuple[int, bool], set[CallRoom]] = {}
    for k, was_dropped, room in _rooms(profile, problem, schedule):
        rooms.setdefault((profile.stages[k].menu, was_dropped), set()).add(room)
    menus = [*profile.menus]
    searches: dict[int, list[CallRoom]] = {}
    for (menu, _), each in rooms.items():
        searches.setdefault(menu, []).extend(_spread(sorted(each)))
    count = sum(map(len, searches.values()))
    for menu, each in searches.items():
        menus[menu] = _with_programs_for(menus[menu], each, seconds / count)
    return profile if menus == [*profile.menus] else replace(profile, menus=tuple(menus))


def _with_programs_for(menu: MenuRecord, rooms: Iterable[CallRoom], time_limit_seconds: float) -> MenuRecord:
    graph = menu.graph
    assert graph is not None
    known = {option.runs for option in menu.options}
    for room in rooms:
        runs = _runs_within(graph, room, time_limit_seconds)
        if runs is not None and runs not in known:
            known.add(runs)
            menu = replace(menu, options=(*menu.options, menu.program(runs)))
    return menu


def _rooms(profile: Profile, problem: Problem, schedule: Schedule) -> Iterable[tuple[int, bool, CallRoom]]:
    """Per stage that a schedule runs as a program, or runs again, the room that it leaves.

    For one that is dropped first there are two: of its last run, and, marked, of a program from its first run on.
    """
    timeline = replay(problem.chain, schedule, problem.link).timeline
    first: dict[int, int] = {}
    latest: dict[int, int] = {}
    for place, entry in enumerate(timeline):
        k = entry.action.stage
        if entry.action.kind in RUNS:
            if entry.action.option is not None and (entry.action.option or k in first):
                latest[k] = place
            first.setdefault(k, place)
        elif entry.action.kind == "backward" and k in latest:
            menu = profile.menus[profile.stages[k].menu] if profile.stages[k].menu >= 0 else None
            if menu is None or menu.once is None:
                continue
            yield k, False, _room(menu, problem, timeline[latest[k] : place + 1], 0)
            if first[k] < latest[k]:
                yield k, True, _room(menu, problem, timeline[first[k] : place + 1], latest[k] - first[k])


def _room(menu: MenuRecord, problem: Problem, entries: Sequence[ReplayedAction], latest: int) -> CallRoom:
    """The rest of the budget from a run of a stage to its backward, in terms of the replay of its call.

    Args:
        menu: of the stage.
        problem: its chain, and the budget.
        entries: from the run to the backward.
        latest: the place among them of the run that its backward follows; before it nothing of the stage is kept.
    """
    run, backward = entries[0], entries[-1]
    options = problem.chain.stages[run.action.stage].options
    number = entries[latest].action.option or 0
    chosen = options[number]
    known = next(n for n, each in enumerate(menu.options) if each.runs is not None and n + 1 >= (number or 1))
    like, option = options[known + 1], menu.options[known]
    assert menu.graph is not None and option.runs is not None
    own = call_replay(menu.graph, option.runs)
    budget_bytes = problem.budget_bytes
    again = run.action.kind == "recompute"
    own_peak_bytes = like.recompute_peak_bytes if again else like.forward_peak_bytes
    # As if it ran as the program whose replay is at hand.
    like_bytes = like.kept_bytes + like.kept_output_bytes
    change_bytes = like_bytes - chosen.kept_bytes - chosen.kept_output_bytes
    forward_room = budget_bytes - run.before_bytes - own_peak_bytes
    backward_room = budget_bytes - backward.before_bytes - change_bytes - like.backward_peak_bytes
    forward_bytes = max(0, own.forward_peak_bytes + forward_room)
    backward_bytes = max(0, own.backward_peak_bytes + backward_room)
    alive = [entry.peak_bytes + like_bytes for entry in entries[1:latest]]
    alive += [entry.peak_bytes + change_bytes for entry in entries[latest + 1 : -1]]
    if not alive:
        between_bytes = max(forward_bytes, backward_bytes)
    else:
        handed_bytes = own.kept_bytes + _returned_bytes(menu.graph)
        between_bytes = max(0, handed_bytes + budget_bytes - max(alive))
    return CallRoom(forward_bytes, between_bytes, backward_bytes)


def _runs_within(step: StepGraph, room: CallRoom, time_limit_seconds: float) -> StepRuns | None:
    """The fastest order of runs that is found for a room; None where none is."""
    most_bytes = max(room)
    around = StepSurroundings(
        forward_bytes=most_bytes - room.forward_peak_bytes,
        backward_bytes=most_bytes - room.backward_peak_bytes,
        loss_bytes=most_bytes - room.between_bytes,
        loss_kept=replay_step(step, runs_once(step)).handed,
    )
    try:
        return order_within(most_bytes, step, around, problem_of_call(step, around), time_limit_seconds)
    except Infeasible:
        return None


def _least_peak(step: StepGraph, time_limit_seconds: float, *, between_bytes: int = 0) -> int:
    """The smallest peak of a program that is found, with ``between_bytes`` of others between forward and backward."""
    around = StepSurroundings(forward_bytes=0, backward_bytes=0, loss_bytes=between_bytes)
    try:
        order_within(1, step, around, problem_of_call(step, around), time_limit_seconds)
    except Infeasible as refusal:
        return refusal.minimum_budget_bytes
    return 1


def _returned_bytes(step: StepGraph) -> int:
    return sum(storage.size_bytes for storage in step.storages if storage.returned)


def _spread(rooms: list[CallRoom]) -> list[CallRoom]:
    """A few of many, the smallest and the largest among them."""
    if len(rooms) <= _MOST_ROOMS:
        return rooms
    return [rooms[number * (len(rooms) - 1) // (_MOST_ROOMS - 1)] for number in range(_MOST_ROOMS)]


def _unbeaten(choices: Iterable[CallReplay]) -> tuple[CallReplay, ...]:
    unbeaten: dict[tuple[int, int, int], CallReplay] = {}
    for choice in sorted(choices, key=lambda each: (each.seconds, each.kept_bytes, each.backward_peak_bytes)):
        takes = choice.kept_bytes, choice.forward_peak_bytes, choice.backward_peak_bytes
        if not any(all(a <= b for a, b in zip(other, takes, strict=True)) for other in unbeaten):
            unbeaten[takes] = choice
    return tuple(unbeaten.values())


# Of the time that is left, for rounds of less and less room, where the replay of an order is above what its graph says.
_ROUND_SHARES = (0.8, 0.5, 1.0)


def order_within(
    budget_bytes: int, step: StepGraph, around: StepSurroundings, problem: StepProblem, time_limit_seconds: float
) -> StepRuns:
    """The fastest order of a call's ops that is found within a budget.

    Where the replay of an order is above the budget, the next one is found in less room.

    Raises:
        Infeasible: nothing was found; carries the smallest budget known to be feasible.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    least_bytes, room_bytes = 0, budget_bytes
    for share in _ROUND_SHARES:
        with Deadline(left_seconds() * share):
            solution = solve_graph(problem.graph, room_bytes, time_limit_seconds=time_limit_seconds)
        if solution.interrupted:
            raise KeyboardInterrupt
        if solution.schedule is None and least_bytes:
            break
        runs = without_unread_runs(step, runs_of(problem, require_schedule(solution, budget_bytes, "auto")))
        peak_bytes = around.peak_bytes(step, runs)
        if peak_bytes <= budget_bytes:
            return runs
        least_bytes = min(least_bytes or peak_bytes, peak_bytes)
        room_bytes -= peak_bytes - budget_bytes
    raise Infeasible(
        minimum_budget_bytes=least_bytes,
        reason="the orders that were found hand over what forward returns and nobody holds",
        solver="auto",
        budget_bytes=budget_bytes,
        proven=False,
    )


def runs_of(problem: StepProblem, solution: Solution) -> StepRuns:
    """The runs of a solution's schedule, without nodes that stand for no op."""
    turns = [*_turns(problem, solution)]
    loss = next(k for k, (name, _) in enumerate(turns) if name == problem.loss)
    forward, backward = ([k for _, ordinals in part for k in ordinals] for part in (turns[:loss], turns[loss + 1 :]))
    return StepRuns(tuple(forward), tuple(backward))


def _turns(problem: StepProblem, solution: Solution) -> Iterator[tuple[str, list[int]]]:
    """The nodes of a schedule in the order of their runs, with ordinals of the ops that run."""
    assert solution.schedule is not None
    ran: set[str] = set()
    for node in solution.schedule.nodes_run():
        name = problem.graph.nodes[node].name
        group = problem.groups.get(name)
        yield name, [] if group is None else group.ops if name in ran else group.first_run
        ran.add(name)


def first_difference(planned: StepGraph, found: StepGraph, *, sizes_differ: bool = False) -> str:
    """The first difference between the ops of a plan and those of a model, in words; empty where nothing does.

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


_PRICES = 10
_SECONDS = 2.0  # for each program
_TOLERANCE = 1e-6  # relative, of HiGHS


class LeastCost(NamedTuple):
    """Bytes kept and seconds of what runs again; no program lies below all of them, whatever a byte costs."""

    kept_bytes: int
    seconds: float


def chain_with_any_programs(chain: Chain, numbers: Sequence[int], menus: Sequence[MenuRecord]) -> Chain:
    """The chain where captured stages have programs that no other ones beat: for bounds, not to be carried out.

    Args:
        chain: whose options are keeping everything, and those of the menus.
        numbers: of each stage that of its menu; -1 for none.
        menus: of the stages.

    Returns:
        The chain itself where no stage is captured.
    """
    if all(menu.once is None for menu in menus):
        return chain
    stages = list(chain.stages)
    for k, number in enumerate(numbers):
        if number >= 0 and menus[number].once is not None:
            stages[k] = replace(chain.stages[k], options=_any_programs(chain.stages[k].options, menus[number]))
    return replace(chain, stages=tuple(stages))


def held_against_any_programs(
    refusal: Infeasible,
    problem: Problem,
    numbers: Sequence[int],
    menus: Sequence[MenuRecord],
    seconds_outside_chain: float = 0.0,
) -> Infeasible:
    """A refusal whose claims hold for all programs of captured stages, not only for those that were chosen from.

    Args:
        refusal: of the chain with the programs of the menus.
        problem: that chain, and the budget.
        numbers, menus: as ``chain_with_any_programs`` takes them.
        seconds_outside_chain: of a step.
    """
    any_programs = chain_with_any_programs(problem.chain, numbers, menus)
    if any_programs is problem.chain:
        return refusal
    bound = bound_seconds(any_programs, problem.budget_bytes, problem.link)
    if bound == math.inf:
        return replace(refusal, proven=True)
    return replace(refusal, proven=False, lower_bound_seconds=bound + seconds_outside_chain)


def _any_programs(options: Sequence[Option], menu: MenuRecord) -> tuple[Option, ...]:
    """Keeping everything, what is no program, and the programs that none beats."""
    once = menu.once
    assert once is not None and once.runs is not None and menu.graph is not None
    replayed = call_replay(menu.graph, once.runs)
    measured = options[1 + menu.options.index(once)]
    pace = once.backward_seconds / replayed.backward_seconds if replayed.backward_seconds > 0 else 1.0
    always_bytes = options[0].kept_bytes - once.freed_bytes - replayed.kept_bytes
    least = [
        replace(
            measured,
            name="any program",
            backward_seconds=measured.backward_seconds + pace * cost.seconds,
            kept_bytes=always_bytes + cost.kept_bytes,
            kept_output_bytes=0,
            forward_peak_bytes=0,
            backward_peak_bytes=0,
            recompute_peak_bytes=0,
        )
        for cost in least_costs(menu.graph)
    ]
    others = [option for option, record in zip(options[1:], menu.options, strict=True) if record.runs is None]
    return (options[0], *others, *least)


@functools.lru_cache(maxsize=64)
def least_costs(graph: StepGraph) -> tuple[LeastCost, ...]:
    """Lower bounds on every program of a call.

    >>> from profiler.step_graph import StepOp, StepStorage
    >>> made = tuple(StepStorage(size_bytes=size) for size in (4, 2))
    >>> ops = (StepOp(name="a", op="a", makes=(0,), seconds=1.0), StepOp(name="b", op="b", makes=(1,), seconds=1.0),
    ...        StepOp(name="c", op="c", side="backward", reads=(0, 1)))
    >>> costs = least_costs(StepGraph(ops=ops, storages=made, resident_bytes=0))
    >>> min(cost.seconds + 0.1 * cost.kept_bytes for cost in costs) <= 0.6
    True
    """
    forward = [op for op in graph.ops if op.side == "forward"]
    ratios = [
        op.seconds / size_bytes
        for op in forward
        if op.seconds > 0 and (size_bytes := sum(graph.storages[s].size_bytes for s in op.makes)) > 0
    ]
    least = _LeastPriced(graph)
    least_bytes = least.value(0.0, 1.0)
    if not ratios:
        return (LeastCost(int(least_bytes), 0.0),)
    prices = [0.0, *np.geomspace(min(ratios) / 2, 2 * sum(op.seconds for op in forward), _PRICES)]
    values = [0.0, *(least.value(1.0, price) for price in prices[1:])]
    chords = [LeastCost(int(least_bytes), max(0.0, values[-1] - prices[-1] * least_bytes))]
    for k in range(1, len(prices)):
        slope = (values[k] - values[k - 1]) / (prices[k] - prices[k - 1])
        chords.append(LeastCost(int(slope), max(0.0, values[k] - prices[k] * slope)))
    return tuple(chords)


class _LeastPriced:
    """The linear program of a call; its rows are the same at every price."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        once = call_replay(graph, runs_once(graph))
        self._most_seconds, self._most_bytes = max(once.seconds, 1e-9), max(once.kept_bytes, 1)
        self._program = Program()
        self._seconds: list[float] = []  # of each variable, and bytes
        self._bytes: list[int] = []
        self._maker = {s: k for k, op in enumerate(graph.ops) if op.side == "forward" for s in op.makes}
        self._keep = {
            s: self._variable(0.0, 0 if storage.returned else storage.size_bytes)
            for s, storage in enumerate(graph.storages)
            if s in self._maker
        }
        self._again = {
            k: self._variable(op.seconds, op.state_bytes) for k, op in enumerate(graph.ops) if op.side == "forward"
        }
        for k, op in enumerate(graph.ops):
            if op.side == "forward" and op.once_reason:
                self._program.fix(self._again[k], 0.0)
            for storage in (s for s in op.reads if s in self._keep):
                if op.side == "backward":
                    self._program.row(self._available(storage), lower=1.0)
                else:
                    self._program.row([*self._available(storage), (self._again[k], -1.0)], lower=0.0)

    def value(self, per_second: float, per_byte: float) -> float:
        """The least of priced seconds and bytes that a program takes, or less."""
        scale = per_second * self._most_seconds + per_byte * self._most_bytes
        priced = zip(self._seconds, self._bytes, strict=True)
        costs = [(per_second * seconds + per_byte * size_bytes) / scale for seconds, size_bytes in priced]
        self._program.costs = costs
        answer = self._program.solve(time_limit_seconds=_SECONDS)
        if answer.status != "optimal" or answer.values is None:
            return 0.0
        value = sum(cost * x for cost, x in zip(costs, answer.values, strict=True)) * scale
        return max(0.0, float(value) * (1 - _TOLERANCE) - _TOLERANCE * scale * 1e-3)

    def _variable(self, seconds: float, size_bytes: int) -> int:
        self._seconds.append(seconds)
        self._bytes.append(size_bytes)
        return self._program.variable(integral=False)

    def _available(self, storage: int) -> list[tuple[int, float]]:
        maker = self._maker[storage]
        made_again = storage not in self._graph.ops[maker].once_makes
        return [(self._keep[storage], 1.0), *([(self._again[maker], 1.0)] if made_again else [])]
