"""What a captured call can do: programs that keep less for backward and run more of its ops again, none beaten.

The graph solver finds each of them. An order of runs is searched for within the memory that the call takes where every
op runs once, as if so much more were alive between forward and backward that only a part of what that hands over fits.
"""

from __future__ import annotations

from planner.plans.graph_solving import GraphSearch, order_within
from planner.plans.refusals import NoPlan
from planner.steps.graph_problem import StepSurroundings, step_problem
from profiler.program_replay import CallReplay, call_replay
from profiler.step_graph import StepGraph
from profiler.step_replay import replay_step, runs_once


def program_menu(step: StepGraph, *, levels: int = 6, time_limit_seconds: float = 5.0) -> tuple[CallReplay, ...]:
    """The programs of a call that no other one beats in bytes kept and seconds; the fastest, which keeps most, first.

    Args:
        step: its ops, with what they cost.
        levels: of kept bytes, from none to all, that programs are searched for.
        time_limit_seconds: of all searches together.
    """
    once = call_replay(step, runs_once(step))
    peak_bytes = max(once.forward_peak_bytes, once.backward_peak_bytes)
    returned_bytes = sum(storage.size_bytes for storage in step.storages if storage.returned)
    search = GraphSearch(time_limit_seconds=time_limit_seconds / levels)
    found = [once]
    for level in range(levels):
        room_bytes = once.kept_bytes * level // levels + returned_bytes
        around = StepSurroundings(
            forward_bytes=0,
            backward_bytes=0,
            loss_bytes=max(0, peak_bytes - room_bytes),
            loss_kept=replay_step(step, once.runs, held=False).handed,
        )
        try:
            order = order_within(peak_bytes, step, around, step_problem(step, around), search)
        except NoPlan:
            continue
        found.append(call_replay(step, order.runs))
    return _unbeaten(found)


def _unbeaten(choices: list[CallReplay]) -> tuple[CallReplay, ...]:
    unbeaten: list[CallReplay] = []
    for choice in sorted(choices, key=lambda each: (each.seconds, each.kept_bytes)):
        if not unbeaten or choice.kept_bytes < unbeaten[-1].kept_bytes:
            unbeaten.append(choice)
    return tuple(unbeaten)
