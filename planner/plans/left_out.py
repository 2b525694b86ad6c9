"""Blocks that cannot run again, in words: what they are, why, and what a person can change."""

from __future__ import annotations

from collections.abc import Sequence

from planner.plans.short_names import names_in_short
from profiler.records import LeftOutRecord, Profile, StageRecord

# Of what all stages keep: a stage that keeps less of it is not what stands in the way.
LEAST_SHARE = 0.05
_NAMED = 2  # kinds of blocks that an error names


def never_rerun(profile: Profile) -> tuple[LeftOutRecord, ...]:
    """Blocks that keep much and cannot run again: those that are no stages, and stages; most bytes first."""
    records = sorted([*profile.left_out, *_stages(profile)], key=lambda record: -record.kept_bytes)
    return tuple(records)


def blocks_in_words(record: LeftOutRecord) -> str:
    """Their names and class.

    >>> blocks_in_words(LeftOutRecord(names=("h.0", "h.1"), module_class="Block", kept_bytes=8, reason="it draws"))
    'h.0, 1 (2 Block)'
    """
    names = record.names
    of_class = record.module_class if len(names) == 1 else f"{len(names)} {record.module_class}"
    return f"{names_in_short(names, '')} ({of_class})"


def obstacle_in_words(records: Sequence[LeftOutRecord]) -> str:
    """Which blocks cannot run again and why, for a sentence; empty where there are none."""
    said = [f"{blocks_in_words(record)} cannot run again: {record.reason}" for record in records[:_NAMED]]
    more = f" (and {len(records) - _NAMED} kinds of blocks more)" if len(records) > _NAMED else ""
    return "; ".join(said) + more


def remedy_in_words(records: Sequence[LeftOutRecord]) -> str:
    """What to change, for a sentence; empty where nothing is known."""
    remedies = dict.fromkeys(record.remedy for record in records[:_NAMED] if record.remedy)
    return "; ".join(remedies)


def _stages(profile: Profile) -> list[LeftOutRecord]:
    """Stages that never run again, equal ones together."""
    groups: dict[tuple[str, str, str], list[StageRecord]] = {}
    for stage in profile.stages:
        if stage.kind == "stage" and not stage.recomputable and stage.reason and stage.kept_bytes:
            groups.setdefault((stage.module_class, stage.reason, stage.remedy), []).append(stage)
    records = [
        LeftOutRecord(
            names=tuple(stage.name for stage in stages),
            module_class=module_class,
            kept_bytes=sum(stage.kept_bytes for stage in stages),
            reason=reason,
            remedy=remedy,
        )
        for (module_class, reason, remedy), stages in groups.items()
    ]
    least_bytes = LEAST_SHARE * sum(stage.kept_bytes for stage in profile.stages)
    return [record for record in records if record.kept_bytes >= least_bytes]
