"""Ops that run together: what makes only small results runs once, with what it reads, and is no node of its own.

Of the 918 ops of a GPT-2 with 12 layers a third makes masks, statistics and gradients of biases. A solver that may run
each of them again gains nothing, and takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from profiler.step_graph import StepGraph, StepOp


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGroup:
    """Ops that run one after the other.

    Attributes:
        ordinal: of the op that runs as often as the group does.
        once: ordinals of ops that run after its first run alone.
    """

    ordinal: int
    once: list[int] = field(default_factory=list)


def small_storages(step: StepGraph, most_bytes: float) -> frozenset[int]:
    """The smallest storages that an op makes, as many as hold at most that many bytes together."""
    small: list[int] = []
    for storage in sorted((s for op in step.ops for s in op.makes), key=lambda s: step.storages[s].size_bytes):
        most_bytes -= step.storages[storage].size_bytes
        if most_bytes < 0:
            break
        small.append(storage)
    return frozenset(small)


def groups_of(step: StepGraph, small: frozenset[int]) -> list[OpGroup]:
    """All ops of a step, in groups whose order is one in which they can run.

    An op that makes small storages alone runs with the last of those whose results it reads, if what else it reads is
    alive then anyway.

    Args:
        step: its ops, in an order in which they can run.
        small: storages that always stay.
    """
    groups: list[OpGroup] = []
    place: dict[int, int] = {}  # by storage that of the group that makes it
    for ordinal, op in enumerate(step.ops):
        target = _target(step, op, groups, place, small)
        if target is None:
            target = len(groups)
            groups.append(OpGroup(ordinal=ordinal))
        else:
            groups[target].once.append(ordinal)
        place.update(dict.fromkeys(op.makes, target))
    return groups


def _target(
    step: StepGraph, op: StepOp, groups: list[OpGroup], place: Mapping[int, int], small: frozenset[int]
) -> int | None:
    """The place of the group that an op may run with."""
    if not groups or op.random or not small.issuperset(op.makes) or not place.keys() >= set(op.reads):
        return None
    target = max((place[storage] for storage in op.reads), default=len(groups) - 1)
    main = step.ops[groups[target].ordinal]
    alive = {*main.reads, *main.makes}
    return target if main.side == op.side and alive.issuperset(set(op.reads) - small) else None
