"""The headline's table: one row per way of training, ours and the reference's in the same form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from benchmarks.reporting import MIB

TIMES, SPEED = 10.0, 0.744  # what the reference reaches with recomputation alone
OFFLOAD_TIMES, OFFLOAD_SPEED = 14.3, 0.646  # and with offload
SOURCE = (
    "reference: BERT-Large, sequence 512, mixed precision, one V100 with 32 GB, as documented by PaddlePaddle Fleet "
    "(repository PaddlePaddle/PaddleFleetX, docs/source/paddle_fleet_rst/collective/collective_mp/recomputation.rst)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way of training.

    Attributes:
        form: which model and attention, and whose numbers.
        way: no plan, recompute, or recompute and offload.
        batch: sequences in one step.
        rate: sequences per second.
        base: the form's unplanned row; None for that row itself.
        relative: rate over the unplanned one, where it was measured side by side; None to divide here.
        predicted_relative: the same as predicted.
        predicted_peak_bytes, measured_peak_bytes: of a whole step.
        remark: what to know of the row.
    """

    form: str
    way: str
    batch: int
    rate: float | None
    base: Row | None = None
    relative: float | None = None
    predicted_relative: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    remark: str = ""

    @property
    def times(self) -> float:
        """The batch over the unplanned one."""
        return self.batch / self.base.batch if self.base else 1.0

    @property
    def speed(self) -> float | None:
        """The rate over the unplanned one."""
        if self.base is None:
            return 1.0
        if self.relative is not None or self.rate is None or self.base.rate is None:
            return self.relative
        return self.rate / self.base.rate


def reference() -> list[Row]:
    """The reference's three rows."""
    form = "reference, V100 32 GB"
    none = Row(form=form, way="no plan", batch=18, rate=23.94)
    return [
        none,
        Row(form=form, way="recompute", batch=180, rate=17.82, base=none),
        Row(form=form, way="recompute and offload", batch=258, rate=15.47, base=none),
    ]


def table(rows: Iterable[Row]) -> pd.DataFrame:
    """All rows as they are printed; what was not measured, or not predicted, is a dash."""
    return pd.DataFrame(
        [
            {
                "form": row.form,
                "way": row.way,
                "batch": row.batch,
                "times_unplanned": _number(row.times, 1),
                "sentences_per_second": _number(row.rate, 2),
                "relative_speed": _number(row.speed, 3),
                "predicted_relative_speed": _number(row.predicted_relative, 3),
                "predicted_peak_MiB": _mebibytes(row.predicted_peak_bytes),
                "measured_peak_MiB": _mebibytes(row.measured_peak_bytes),
                "remark": row.remark,
            }
            for row in rows
        ]
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.1f}"


def reached(rows: Iterable[Row]) -> list[str]:
    """What the measured rows with recomputation alone say of the reference's two numbers."""
    own = [row for row in rows if row.way == "recompute" and row.speed is not None and row.measured_peak_bytes]
    fast = [row for row in own if (row.speed or 0.0) >= SPEED]
    if not own:
        return []
    widest = max(own, key=lambda row: row.batch)
    notes = [f"largest batch measured at all, recompute alone: {widest.times:.1f} times at {widest.speed:.3f}"]
    if fast:
        best = max(fast, key=lambda row: row.batch)
        notes.append(f"largest batch measured at {SPEED} or more: {best.times:.1f} times, at {best.speed:.3f}")
    verdict = "reached" if any(row.times >= TIMES for row in fast) else "NOT reached"
    return [*notes, f"{TIMES:.0f} times the batch at {SPEED} of the speed with recomputation alone: {verdict}"]
