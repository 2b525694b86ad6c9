"""Stages of a plan that nothing is known of but how they hang together; and planned stages of other records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.plans.plan import PlannedStage
from profiler.records import Phase, StageRecord


def planned_block(name: str = "block", links: tuple[tuple[int, int], ...] = ()) -> PlannedStage:
    record = StageRecord(name=name, kind="stage", module_class="Block", links=links, forward=Phase(), backward=Phase())
    return PlannedStage(record=record)


def with_record(stage: PlannedStage, **changes: Any) -> PlannedStage:
    """The stage with other values in its record."""
    return replace(stage, record=replace(stage.record, **changes))
