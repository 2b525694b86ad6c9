"""What holding a plan against its own run showed, as a table and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType

from planner.explain.tables import facts, plain_table
from planner.training.verification import Correction, Verification, VerifiedRound
from planner.units import counted, format_seconds


def verification_report(verified: Verification) -> RenderableType:
    """Every round's slowdown as predicted, measured and corrected, and the corrections below."""
    table = plain_table("Held against its own run", ["plan"], ["predicted", "measured", "corrected", "corrections"])
    lines = []
    for number, each in enumerate(verified.rounds, start=1):
        table.add_row(
            f"{number}, used" if each.plan.schedule == verified.plan.schedule else str(number),
            f"{each.plan.slowdown:.3f} x",
            f"{each.measured_slowdown:.3f} x",
            f"{each.corrected_slowdown:.3f} x",
            str(len(each.corrections)),
        )
        lines += [(f"plan {number}", _in_words(correction)) for correction in each.corrections]
    return Group(table, facts(lines)) if lines else table


def _in_words(correction: Correction) -> str:
    what = correction.option or "run again whole"
    return (
        f"{correction.stages[0]} ({counted(len(correction.stages), 'stage')}), {what}: predicted "
        f"{format_seconds(correction.predicted_seconds)} more, measured {format_seconds(correction.measured_seconds)}"
    )


def round_document(each: VerifiedRound) -> dict[str, Any]:
    """One round as plain data; seconds are of a whole step, those of corrections of one stage."""
    return {
        "predicted_seconds": each.plan.predicted_seconds,
        "predicted_slowdown": each.plan.slowdown,
        "measured_seconds": each.planned_seconds,
        "measured_unplanned_seconds": each.unplanned_seconds,
        "measured_slowdown": each.measured_slowdown,
        "corrected_seconds": each.corrected_seconds,
        "corrected_slowdown": each.corrected_slowdown,
        "corrections": [
            {
                "option": correction.option,
                "stages": list(correction.stages),
                "predicted_seconds": correction.predicted_seconds,
                "measured_seconds": correction.measured_seconds,
            }
            for correction in each.corrections
        ],
    }
