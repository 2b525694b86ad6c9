"""A plan's file carries the chain that it was solved on; files without one are read as before."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import planner
from planner.plans.cost_model import chain_of
from planner.units import format_bytes
from profiler.json_files import write_document
from solvers import replay
from tests.support.planned_blocks import with_record


def test_a_plan_carries_the_chain_that_its_schedule_solves(files):
    plan, profile = planner.Plan.load(files / "plan.json"), planner.Profile.load(files / "profile.json")
    assert plan.chain == chain_of(profile)
    assert plan.resident == profile.resident
    assert plan.chain is not None
    assert replay(plan.chain, plan.schedule).peak_bytes == plan.predicted_peak_bytes


def test_a_file_without_a_chain_is_read(files, tmp_path):
    document = json.loads((files / "plan.json").read_text())
    write_document(tmp_path / "old.json", {k: v for k, v in document.items() if k not in ("chain", "resident")})
    plan = planner.Plan.load(tmp_path / "old.json")
    assert (plan.chain, plan.resident) == (None, None)
    assert plan.schedule == planner.Plan.load(files / "plan.json").schedule


SPOILT = [
    ("chain", 3, "fields of this plan"),
    ("chain", {"format": "planner-chain", "version": 1, "stages": []}, "fields of this plan"),
    ("resident", {"parameters": -1, "buffers": 0, "optimizer": 0, "inputs": 0}, "expected int >= 0 at resident"),
    ("resident", 7, "fields of this plan"),
]


@pytest.mark.parametrize(("name", "value", "words"), SPOILT)
def test_a_spoilt_chain_is_refused(files, tmp_path, name, value, words):
    document = json.loads((files / "plan.json").read_text())
    write_document(tmp_path / "plan.json", {**document, name: value})
    with pytest.raises(ValueError, match=words):
        planner.Plan.load(tmp_path / "plan.json")


def test_a_chain_of_other_stages_is_refused(files, tmp_path):
    document = json.loads((files / "plan.json").read_text())
    document["chain"]["stages"].pop()
    write_document(tmp_path / "plan.json", document)
    with pytest.raises(ValueError, match="other stages than the plan"):
        planner.Plan.load(tmp_path / "plan.json")


def test_plans_that_do_the_same_have_the_same_fingerprint(files):
    plan, profile = planner.Plan.load(files / "plan.json"), planner.Profile.load(files / "profile.json")
    assert len(plan.fingerprint) == 16 and planner.Plan.load(files / "plan.json").fingerprint == plan.fingerprint
    slower = replace(plan, predicted_seconds=9.0, solve_seconds=1.0, budget_bytes=plan.budget_bytes + 1, chain=None)
    assert replace(slower, device="cpu:0").fingerprint == plan.fingerprint
    keeps = planner.solve(profile, "100%")
    assert keeps.fingerprint != plan.fingerprint
    for other in ({"device": "cuda"}, {"precision": "bfloat16"}, {"model_class": "Other"}):
        assert replace(plan, **other).fingerprint != plan.fingerprint
    (first, *rest) = plan.stages
    assert replace(plan, stages=(with_record(first, name="x"), *rest)).fingerprint != plan.fingerprint


def test_a_plan_and_a_profile_print_in_a_line_and_a_summary_in_some(files):
    plan, profile = planner.Plan.load(files / "plan.json"), planner.Profile.load(files / "profile.json")
    assert all(len(repr(each)) < 200 and profile.model_class in repr(each) for each in (plan, profile))
    peak, slowdown = plan.summary().splitlines()[1:3]
    assert format_bytes(plan.predicted_peak_bytes) in peak and f"{plan.slowdown:.2f} times" in slowdown
    assert len(plan.summary().splitlines()) < 20


def test_a_notebook_shows_a_plan_as_its_first_lines_a_table_of_decisions_and_a_picture(files):
    plan = planner.Plan.load(files / "plan.json")
    text, _, rest = plan._repr_html_().partition("</pre>")
    assert plan.summary().startswith(html.unescape(text).removeprefix("<pre>"))
    table, end, picture = rest.partition("</table>")
    assert picture == plan.timeline()._repr_svg_()
    rows = [[cell.text or "" for cell in row] for row in ElementTree.fromstring(table + end).iterfind("tbody/tr")]
    stages = [stage for stage in plan.stages if stage.kind == "stage"]
    assert {row[1].split(",")[0] for row in rows} == {stage.decision for stage in stages}
    kept = [stage for stage in stages if stage.decision == "keep"]
    (row,) = (row for row in rows if row[1] == "keep")
    assert row[2] == format_bytes(sum(stage.kept_bytes for stage in kept))


def test_a_notebook_shows_a_plan_of_an_older_release_without_a_picture(files):
    shown = replace(planner.Plan.load(files / "plan.json"), chain=None)._repr_html_()
    assert shown.endswith("</table>")


def test_a_plan_s_picture_has_its_curve_below_the_budget_s_line(files):
    plan = planner.Plan.load(files / "plan.json")
    drawing = ElementTree.fromstring(plan.timeline().svg)
    polygon, line, _ = drawing
    heights = [float(point.split(",")[1]) for point in polygon.attrib["points"].split()]
    bottom = max(heights)
    share = (bottom - min(heights)) / (bottom - float(line.attrib["y1"]))
    assert share == pytest.approx(plan.predicted_peak_bytes / plan.budget_bytes, abs=2e-3)  # Points have one decimal.
    assert len(plan.timeline().svg) < 20_000
    with pytest.raises(ValueError, match="lacks the chain"):
        replace(plan, chain=None).timeline()
