"""Schedules with transfers made by chance: what the tests of offloading start from."""

from __future__ import annotations

import random
from collections.abc import Iterator

from solvers import Chain, Schedule
from solvers.problem.chain import Link
from solvers.problem.schedule import Action

AMPLE = Link(to_host_bytes_per_second=1e12, to_device_bytes_per_second=1e12)


def with_transfers(chain: Chain, schedule: Schedule, drawn: random.Random, share: float = 1.0) -> Schedule:
    """The schedule with offload units sent, let go of and brought back at random moments at which they may be.

    Args:
        chain: the problem.
        schedule: one without transfers.
        drawn: where chance comes from.
        share: of the offload units that travel.
    """
    behind: dict[int, list[tuple[float, Action]]] = {}
    for stage, begin, end, count in _waits(chain, schedule.actions):
        for unit in range(count):
            if drawn.random() < share:
                moments = sorted(drawn.randrange(begin, end) for _ in range(2))
                for kind, moment in zip(("send", "release", "fetch"), (begin, *moments), strict=True):
                    behind.setdefault(moment, []).append((drawn.random(), Action(kind, stage, unit)))
    order = {"send": 0, "release": 1, "fetch": 2}
    actions: list[Action] = []
    for position, action in enumerate(schedule.actions):
        actions.append(action)
        sent = sorted(behind.get(position, ()), key=lambda pair: (order[pair[1].kind], pair[0]))
        actions.extend(action for _, action in sent)
    return Schedule(tuple(actions))


def _waits(chain: Chain, actions: tuple[Action, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Stage, first and last position between which it waits, and how many offload units it has meanwhile."""
    for begin, action in enumerate(actions):
        if action.kind != "forward":
            continue
        k, stage = action.stage, chain.stages[action.stage]
        kinds = ("backward",) if action.option is not None else ("forward", "recompute")
        ends = [i for i in range(begin + 1, len(actions)) if actions[i].stage == k and actions[i].kind in kinds]
        dropped = any(a.kind == "free" and a.stage == k - 1 for a in actions[begin : ends[0]])
        if action.option is not None:
            yield k, begin, ends[0], len(stage.options[action.option].offload_units)
        elif not dropped:
            yield k, begin, ends[0], len(stage.offload_units)
