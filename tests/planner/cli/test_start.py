"""The command line starts quickly: help and all work on files load no torch, and help nothing that draws."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer import main
from typer.testing import CliRunner

from planner.cli import options
from planner.cli.commands import app
from planner.plans import pareto_curves
from solvers import graph_solver_names, solver_names
from solvers.graph import registry
from solvers.problem.examples import training_graph
from tests.support.small_chain import small_chain

RUN = """
import sys
from planner.cli import main

try:
    main()
except SystemExit as end:
    slow = {"torch", "pandas", "matplotlib", "solvers", "plotly", "jinja2"}
    print(end.code, *sorted(slow & set(sys.modules)), file=sys.stderr)
"""
COMMANDS = (
    *("profile", "solve", "pareto", "train", "compare", "estimate", "calibrate", "max-batch", "advise", "show", "demo"),
)


@pytest.fixture(scope="module")
def problems(files, tmp_path_factory):
    """A profile and a plan, and chain and graph problems with their solutions."""
    folder = tmp_path_factory.mktemp("problems")
    for name in ("profile.json", "plan.json"):
        (folder / name).write_bytes((files / name).read_bytes())
    for name, problem in (("chain", small_chain()), ("graph", training_graph(4))):
        (folder / f"{name}.json").write_text(json.dumps(problem.to_dict()))
        ended("solve", f"{name}.json", "--budget", "90%", "-o", f"{name}-solution.json", folder=folder)
    return folder


def ended(*args, folder):
    """The exit code of a command, and which of the packages that take long to import it loaded."""
    done = subprocess.run([sys.executable, "-c", RUN, *args], cwd=folder, capture_output=True, text=True)
    assert done.stderr.strip(), done.stdout
    code, *loaded = done.stderr.splitlines()[-1].split()
    return int(code), loaded


@pytest.mark.slow
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_none_of_the_large_libraries(command, tmp_path):
    assert ended(*[command][: bool(command)], "--help", folder=tmp_path) == (0, [])


@pytest.mark.parametrize(
    ("args", "words"), [((), "Usage: planner"), (("-h",), "Usage: planner"), (("--version",), "planner 0.")]
)
def test_without_a_command_there_is_help_or_the_version(args, words):
    done = CliRunner().invoke(app, args, prog_name="planner")
    assert done.exit_code == 0
    assert words in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ("solve", "profile.json", "--budget", "85%"),
        ("solve", "profile.json", "--budget", "85%", "--json"),
        ("solve", "chain.json", "--budget", "90%"),
        ("solve", "graph.json", "--budget", "90%"),
        ("show", "profile.json"),
        ("show", "plan.json"),
        ("show", "chain-solution.json"),
        ("show", "graph-solution.json"),
    ],
)
def test_planning_from_files_and_showing_them_loads_none_either(args, problems):
    assert ended(*args, folder=problems) == (0, ["solvers"])


@pytest.mark.slow
def test_a_report_loads_no_torch(problems):
    assert ended("show", "plan.json", "-o", "page.html", folder=problems) == (0, ["jinja2", "plotly", "solvers"])


@pytest.mark.slow
def test_a_refusal_loads_none_either(problems):
    assert ended("solve", "profile.json", "--budget", "1", folder=problems) == (3, ["solvers"])
    assert ended("show", "nothing.json", folder=problems) == (2, ["solvers"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["profile.json", "chain.json", "graph.json"])
def test_curves_are_drawn_without_torch(name, problems):
    code, loaded = ended("pareto", name, "-o", "curve.png", "--time-limit", "2", folder=problems)
    assert (code, "torch" in loaded, "matplotlib" in loaded) == (0, False, True)


@pytest.mark.slow
def test_a_timeline_is_drawn_without_torch(problems):
    code, loaded = ended("show", "plan.json", "-o", "step.png", folder=problems)
    assert (code, "torch" in loaded, "matplotlib" in loaded) == (0, False, True)


def test_help_says_what_the_solvers_say():
    assert options.CHAIN_SOLVERS.split(", ") == list(solver_names())
    assert options.GRAPH_SOLVERS.split(", ") == list(graph_solver_names())
    assert options.GRAPH_SECONDS == registry.DEFAULT_SECONDS
    large = (options.LARGE_GRAPH_NODES, options.LARGE_GRAPH_SECONDS)
    assert large == (registry.LARGE_NODES, registry.LARGE_SECONDS)
    assert pareto_curves.GRAPH_SECONDS == options.PARETO_SECONDS


MOST_OPTIONS = 79  # in the help of all commands together, --help aside; each is one more to read and to test


def test_help_lists_few_options():
    group = main.get_command(app)
    commands = group.commands  # pyright: ignore[reportAttributeAccessIssue]
    shown = [
        (name, max(param.opts, key=len))
        for name, command in commands.items()
        for param in command.params
        if param.param_type_name == "option" and not param.hidden
    ]
    assert set(commands) == set(COMMANDS)
    assert len(shown) <= MOST_OPTIONS, shown
