"""Parcels that are taken as away: what a chain would need on the device if they left none of their bytes there."""

from __future__ import annotations

from dataclasses import replace

from solvers.problem.chain import Chain, Stage


def has_parcels(chain: Chain, host_bytes: int | None = None) -> bool:
    """Whether any stage holds something that could travel and that host memory has room for."""
    sizes = (size for s in chain.stages for held in (s, *s.options) for size in held.parcels)
    return any(size and (host_bytes is None or size <= host_bytes) for size in sizes)


def without_parcels(chain: Chain, count: int | None = None) -> Chain:
    """The chain as it would be if all parcels of the first ``count`` stages (None: of all) were always away.

    At the start of every backward a schedule with copies holds at least what the same schedule holds in this chain, so
    that ``lower_bound.bound_seconds`` of it bounds them all, however fast the link is.
    """
    stages = list(chain.stages)
    resident_bytes = chain.resident_bytes
    for k in range(len(stages) if count is None else min(count, len(stages))):
        before_bytes = stages[k - 1].boundary_bytes if k else resident_bytes
        sent_bytes = min(before_bytes, sum(stages[k].parcels))  # of its input, where it waits
        if k:
            stages[k - 1] = replace(stages[k - 1], boundary_bytes=before_bytes - sent_bytes)
        else:
            resident_bytes -= sent_bytes
        stages[k] = _kept_away(stages[k], sent_bytes)
    return replace(chain, stages=tuple(stages), resident_bytes=resident_bytes)


def _kept_away(stage: Stage, sent_bytes: int) -> Stage:
    """The stage with its kept parcels away; where it is kept, what it would send of its input while it waits stays."""
    options = tuple(replace(o, kept_bytes=o.kept_bytes - sum(o.parcels) + sent_bytes) for o in stage.options)
    return replace(stage, options=options)
