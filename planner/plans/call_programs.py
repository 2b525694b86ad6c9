"""What a captured call can do: programs that keep less for backward and run more of its ops again, found by the graph
solver: a menu of them, and those for exactly the room that a plan leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from planner.plans.graph_solving import GraphSearch, order_within
from planner.plans.refusals import Infeasible
from planner.steps.graph_problem import StepSurroundings, step_problem
from profiler.program_replay import CallReplay, call_replay
from profiler.records import MenuRecord, Profile
from profiler.step_graph import StepGraph, StepRuns, replay_step, runs_once
from solvers import Problem, Schedule, replay
from solvers.problem.chain import RUNS
from solvers.problem.chain_simulator import ReplayedAction

_MENU_SECONDS = 1.5  # for all searches of a menu together
_LEVELS = 6  # of kept bytes, from the least to all, that programs are searched for
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
    search = GraphSearch(time_limit_seconds=_MENU_SECONDS / (_LEVELS + _PEAK_LEVELS + 2))
    beside_bytes = 2 * once_bytes  # between forward and backward: so much that nothing else decides
    least_bytes = min(most_bytes, _least_peak(step, search, between_bytes=beside_bytes) - beside_bytes)
    rooms = [
        CallRoom(once_bytes, least_bytes + (most_bytes - least_bytes) * level // _LEVELS, once_bytes)
        for level in range(_LEVELS)
    ]
    least_peak_bytes = _least_peak(step, search)
    for level in range(_PEAK_LEVELS):
        peak_bytes = least_peak_bytes + (once_bytes - least_peak_bytes) * level // _PEAK_LEVELS
        rooms.append(CallRoom(peak_bytes, peak_bytes, peak_bytes))
    found = [once]
    for room in dict.fromkeys(rooms):
        runs = _runs_within(step, room, search)
        if runs is not None:
            found.append(call_replay(step, runs))
    return _unbeaten(found)


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
        menus[menu] = _with_programs_for(menus[menu], each, GraphSearch(time_limit_seconds=seconds / count))
    return profile if menus == [*profile.menus] else replace(profile, menus=tuple(menus))


def _with_programs_for(menu: MenuRecord, rooms: Iterable[CallRoom], search: GraphSearch) -> MenuRecord:
    graph = menu.graph
    assert graph is not None
    known = {option.runs for option in menu.options}
    for room in rooms:
        runs = _runs_within(graph, room, search)
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
    """What is left of the budget from a run of a stage to its backward, in terms of the replay of its call.

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


def _runs_within(step: StepGraph, room: CallRoom, search: GraphSearch) -> StepRuns | None:
    """The fastest order of runs that is found for a room; None where none is."""
    most_bytes = max(room)
    around = StepSurroundings(
        forward_bytes=most_bytes - room.forward_peak_bytes,
        backward_bytes=most_bytes - room.backward_peak_bytes,
        loss_bytes=most_bytes - room.between_bytes,
        loss_kept=replay_step(step, runs_once(step)).handed,
    )
    try:
        return order_within(most_bytes, step, around, step_problem(step, around), search)
    except Infeasible:
        return None


def _least_peak(step: StepGraph, search: GraphSearch, *, between_bytes: int = 0) -> int:
    """The smallest peak of a program that is found, with ``between_bytes`` of others between forward and backward."""
    around = StepSurroundings(forward_bytes=0, backward_bytes=0, loss_bytes=between_bytes)
    try:
        order_within(1, step, around, step_problem(step, around), search)
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


def _unbeaten(choices: list[CallReplay]) -> tuple[CallReplay, ...]:
    unbeaten: dict[tuple[int, int, int], CallReplay] = {}
    for choice in sorted(choices, key=lambda each: (each.seconds, each.kept_bytes, each.backward_peak_bytes)):
        takes = choice.kept_bytes, choice.forward_peak_bytes, choice.backward_peak_bytes
        if not any(all(a <= b for a, b in zip(other, takes, strict=True)) for other in unbeaten):
            unbeaten[takes] = choice
    return tuple(unbeaten.values())
