"""The page: one file that loads nothing, whatever parts of a model are called, and the command that writes it."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest

import planner
from planner.report import charts
from planner.report.command_results import BarChart, ResultSection, ResultTable
from planner.report.commands import commands_of, solve_command
from planner.report.page import Page, page_html, write_report
from planner.report.plan_report import report_of_plan
from solvers import Link
from tests.support.command_line import SMALL, done, refused
from tests.support.planned_blocks import with_record


class Parsed(HTMLParser):
    """The tags of a page with their attributes, and the texts of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data

    @property
    def data(self):
        (at,) = [k for k, attrs in enumerate(a for t, a in self.tags if t == "script") if attrs.get("id") == "data"]
        return json.loads(self.scripts[at])


@pytest.fixture(scope="module")
def plan(files):
    return planner.Plan.load(files / "plan.json")


@pytest.fixture(scope="module")
def page(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(plan, path)
    return Parsed(path.read_text())


def test_the_page_loads_nothing(page):
    links = [(tag, attrs[key]) for tag, attrs in page.tags for key in ("src", "href") if key in attrs]
    assert links == [("link", "data:,")]
    assert not any("import " in attrs.get("type", "") for tag, attrs in page.tags if tag == "script")


def test_the_page_fits_phones_and_dark_rooms(page):
    metas = {attrs["name"]: attrs["content"] for tag, attrs in page.tags if tag == "meta" and "name" in attrs}
    assert metas == {"viewport": "width=device-width, initial-scale=1", "color-scheme": "light dark"}


def test_the_data_follow_the_plan(page, plan):
    data = page.data
    assert set(data["figures"]) == {"timeline", "peaks", "curve"}
    actions = data["steps"][1]["actions"]
    assert actions[data["steps"][1]["peak"]][4] == max(action[4] for action in actions) == plan.predicted_peak_bytes
    curve = data["figures"]["curve"]["data"][0]
    assert len(curve["x"]) == len(data["curve"]) > 2
    assert data["curve"][data["start"]]["command"].split()[4] == str(plan.predicted_peak_bytes)


def test_names_end_no_tag(plan):
    bad = "</script><b>&amp;"
    stages = (with_record(plan.stages[0], name=bad), *plan.stages[1:])
    first = dataclasses.replace(plan.chain.stages[0], name=bad)
    chain = dataclasses.replace(plan.chain, stages=(first, *plan.chain.stages[1:]))
    report = report_of_plan(dataclasses.replace(plan, stages=stages, chain=chain, model_class=bad))
    page = Parsed(page_html(Page(title=bad, plan=report)))
    assert not any(tag == "b" for tag, _ in page.tags)
    assert any(action[1] == bad for action in page.data["steps"][1]["actions"])


def test_results_stand_above_the_plan():
    table = ResultTable(title="Table", columns=("solver", "peak"), rows=(("<rotor>", "2 KiB"),), numbers=1)
    chart = BarChart(names=("rotor",), series=(("measured", (2048,)),), budget_bytes=4096)
    result = ResultSection(
        title="Result", sentence="It fits.", facts=(("budget", "4 KiB"),), tables=(table,), chart=chart
    )
    text = page_html(Page(title="Comparison", results=(result,), commands=("planner compare x",)))
    assert '<p class="answer" id="answer">It fits.</p>' in text
    assert re.search(r'<td>&lt;rotor&gt;</td>\s*<td class="number">2 KiB</td>', text)
    assert set(Parsed(text).data["figures"]) == {"result-0"}


def test_a_plan_without_a_curve_says_why(plan):
    text = page_html(Page(title="Plan", plan=dataclasses.replace(report_of_plan(plan), curve=())))
    assert "there is no curve" in text
    assert set(Parsed(text).data["figures"]) == {"timeline", "peaks"}


def test_the_page_s_files_are_part_of_the_package():
    root = Path(planner.__file__).parent.parent
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [path.name for path in (root / "planner/report").iterdir() if path.is_file() and path.suffix != ".py"]
    assert len(files) == 3
    assert all(any(fnmatch(name, pattern) for pattern in data["planner.report"]) for name in files)


def test_commands_say_how_the_plan_was_solved(plan):
    link = Link(to_host_bytes_per_second=25e9, to_device_bytes_per_second=25e9)
    given = dataclasses.replace(plan, budget_bytes=900, headroom_bytes=100, link=link, offload_only=True)
    command = "planner solve profile.json --budget 900 --headroom 100 --offload only,gbps=25 -o plan.json"
    assert command in commands_of(given, "zoo:mlp --set layers=2")
    assert commands_of(given, "zoo:mlp --set layers=2")[0] == "planner profile zoo:mlp --set layers=2 -o profile.json"
    measured = dataclasses.replace(given, link=dataclasses.replace(link, to_device_bytes_per_second=24e9))
    assert commands_of(given, None, "runs/mlp.plan.json")[1:] == (
        "planner solve runs/mlp.profile.json --budget 900 --headroom 100 --offload only,gbps=25 -o runs/mlp.plan.json",
        "planner train --plan runs/mlp.plan.json",
        "planner show runs/mlp.plan.json -o report.html",
    )
    assert solve_command(measured, 500) == "planner solve profile.json --budget 500 --offload only -o plan.json"


def test_a_page_without_charts_has_no_plotly():
    assert len(page_html(Page(title="Nothing"))) < 2**16


def test_charts_have_what_is_sent_to_the_host(files):
    profile = planner.Profile.load(files / "profile.json")
    offload = planner.Offload(link_gbps=1.0)
    plan = planner.solve(profile, "85%", offload=offload)
    assert plan.host_bytes
    figure = charts.timeline_figure(report_of_plan(plan))
    assert {"to host", "to device"} <= {trace["name"] for trace in figure.to_plotly_json()["data"]}


def test_show_writes_a_page(tmp_path, plan):
    file = tmp_path / "mine.json"
    plan.save(file)
    assert f"written: {tmp_path / 'mine.html'}" in done("show", file, "-o", tmp_path / "mine.html").stderr
    text = (tmp_path / "mine.html").read_text()
    assert f"planner solve profile.json --budget {plan.budget_bytes} -o {file}" in text


@pytest.mark.slow
def test_a_page_has_what_was_measured(files, tmp_path):
    done("show", files / "plan.json", "-o", tmp_path / "r.html", "--measure")
    text = (tmp_path / "r.html").read_text()
    assert "Measured peak" in text
    assert f"planner profile zoo:mlp {' '.join(SMALL)} -o {files / 'profile.json'}" in text
    names = [trace["name"] for trace in Parsed(text).data["figures"]["timeline"]["data"]]
    assert {"measured with the plan", "measured without the plan"} <= set(names)


def test_pages_that_cannot_be_are_refused_in_words(files, tmp_path):
    assert "expected a page's name ending in .html" in refused(
        "show", files / "plan.json", "--html", tmp_path / "r.pdf"
    )
    assert "planner-profile" in refused("show", files / "profile.json", "-o", tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []
