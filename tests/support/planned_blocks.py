"""Stages of a plan that nothing is known of but how they hang together."""

from __future__ import annotations

from planner.plans.plan import PlannedStage


def planned_block(name: str = "block", links: tuple[tuple[int, int], ...] = ()) -> PlannedStage:
    return PlannedStage(
        name=name,
        kind="stage",
        module_class="Block",
        decision="keep",
        kept_bytes=0,
        runs=1,
        extra_seconds=0.0,
        extra_ops=0,
        links=links,
        input_shapes=(),
        parameter_shapes=(),
        mutated_buffers=(),
    )
