"""docs/dependencies.md and CITATION.cff are those of the package."""

from __future__ import annotations

import re
import tomllib
from email.message import Message
from importlib.metadata import PackageNotFoundError, distribution

import pytest
import yaml

import planner
from docs.hooks.dependencies_page import PAGE, dependencies_page, licence_of
from docs.hooks.rooms_table import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ROWS = {
    re.split(r"[<>=~!]", row[0])[0]: row[-1]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and (row := [cell.strip() for cell in line.strip("|").split("|")])[0] != "---"
}


def test_every_requirement_is_on_the_page_as_it_is_required():
    page = PAGE.read_text(encoding="utf-8")
    extras = PROJECT["optional-dependencies"]
    wanted = {*PROJECT["dependencies"], *(text for name in extras if name != "docs" for text in extras[name])}
    plain = [re.sub(r"\[.*\]", "", text) for text in sorted(wanted)]
    missing = [text for text in plain if f"| {text} |" not in page]
    assert missing == [], "run python -m docs.hooks.dependencies_page"


def test_the_page_is_what_the_command_writes_but_for_what_a_platform_adds():
    """Requirements of requirements differ by platform and version; all that stands above them does not."""
    title = "## What these require in turn"
    committed, written = (text.partition(title)[0] for text in (PAGE.read_text(encoding="utf-8"), dependencies_page()))
    assert committed == written, "run python -m docs.hooks.dependencies_page"


def test_licences_are_those_that_the_installed_packages_say():
    wrong = {}
    for name, licence in ROWS.items():
        try:
            said = licence_of(distribution(name))
        except (PackageNotFoundError, ValueError):
            continue
        if said != licence:
            wrong[name] = (licence, said)
    assert wrong == {} and len(ROWS) > 20


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ([("License-Expression", "MIT"), ("License", "see file")], "MIT"),
        ([("Classifier", "License :: OSI Approved :: BSD License"), ("License", "BSD")], "BSD License"),
        ([("License", "Apache 2.0\nand all of its text")], "Apache 2.0"),
        ([], "not said"),
    ],
)  # fmt: skip
def test_a_licence_is_the_most_exact_thing_said(fields, licence):
    class Found:
        metadata = Message()

    for key, value in fields:
        Found.metadata[key] = value
    assert licence_of(Found) == licence  # type: ignore[arg-type]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == planner.__version__
    assert citation["license"] == PROJECT["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    released = f"## [{planner.__version__}] - {citation['date-released']}"
    assert released in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
