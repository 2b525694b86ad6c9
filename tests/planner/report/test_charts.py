"""The charts of a report: what a reader has to tell apart looks different."""

from __future__ import annotations

from typing import Any

from planner.explain.peak import PeakRow
from planner.report.charts import peaks_figure
from planner.report.plan_report import PeakTable


def test_no_two_parts_of_a_peak_look_alike():
    rows = tuple(PeakRow(what=f"part {k}", op="", where="", tensors=1, size_bytes=100 - k) for k in range(30))
    figure: Any = peaks_figure([PeakTable(name="with the plan", title="", peak_bytes=3000, rows=rows)])
    looks = [(bar.marker.color, bar.marker.pattern.shape) for bar in figure.data]
    assert len(looks) == 30 and len(set(looks)) == 30
