"""What a captured call can do: programs that keep less for backward and run more of its ops again, none beaten.

The graph solver finds each of them. An order of runs is searched for within the memory that the call takes where every
op runs once, as if so much more were alive between forward and backward that only a part of what that hands over fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.plans.graph_solving import GraphSearch, order_within
from planner.plans.refusals import NoPlan
from planner.steps.graph_problem import StepSurroundings, step_problem
from profiler.step_graph import StepGraph
from profiler.step_replay import StepRuns, replay_step, runs_once


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramChoice:
    """An order of the runs of a call's ops, and what its replay says of it.

    Attributes:
        runs: the order.
        kept_bytes: what forward hands over to backward, beside what it returns, parameters and arguments.
        forward_peak_bytes: the most alive in forward, of what its ops make.
        backward_peak_bytes: the most alive in backward: what was kept, gradients of what forward returned, what its
            ops make.
        forward_seconds, backward_seconds: of the ops.
    """

    runs: StepRuns
    kept_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.forward_seconds + self.backward_seconds


def program_menu(step: StepGraph, *, levels: int = 6, time_limit_seconds: float = 5.0) -> tuple[ProgramChoice, ...]:
    """The programs of a call that no other one beats in bytes kept and seconds; the fastest, which keeps most, first.

    Args:
        step: its ops, with what they cost.
        levels: of kept bytes, from none to all, that programs are searched for.
        time_limit_seconds: of all searches together.
    """
    once = choice_of(step, runs_once(step))
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
        found.append(choice_of(step, order.runs))
    return _unbeaten(found)


def choice_of(step: StepGraph, runs: StepRuns) -> ProgramChoice:
    """What the replay of an order says."""
    replay = replay_step(step, runs, held=False)
    sizes = [storage.size_bytes for storage in step.storages] + [op.state_bytes for op in step.ops]
    returned = {number for number, storage in enumerate(step.storages) if storage.returned}
    forward_seconds, backward_seconds = (sum(step.ops[ordinal].seconds for ordinal in side) for side in runs)
    return ProgramChoice(
        runs=runs,
        kept_bytes=sum(sizes[number] for number in replay.handed - returned),
        forward_peak_bytes=replay.forward.peak_bytes,
        backward_peak_bytes=replay.backward.peak_bytes,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
    )


def _unbeaten(choices: list[ProgramChoice]) -> tuple[ProgramChoice, ...]:
    unbeaten: list[ProgramChoice] = []
    for choice in sorted(choices, key=lambda each: (each.seconds, each.kept_bytes)):
        if not unbeaten or choice.kept_bytes < unbeaten[-1].kept_bytes:
            unbeaten.append(choice)
    return tuple(unbeaten)
