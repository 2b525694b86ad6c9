"""What is said of wrong input: one style, which names the option; in JSON with --json; the target's own line."""

from __future__ import annotations

import errno
import json
import os
import re
import warnings

import pytest
import typer.main
from typer.testing import CliRunner

from planner.cli import output
from planner.cli.arguments import naming_option, option_in
from planner.cli.commands import app
from planner.cli.output import Output
from profiler import json_files
from tests.support.command_line import TARGETS, done, refused, run

COMMANDS = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
TINY = ("zoo:mlp", "--set", "layers=2", "hidden=8", "batch=4")
RAISES = """
def inner():
    raise KeyError('no such data')

def outer():
    return inner()
"""


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_parameter_has_help(name):
    params = COMMANDS[name].params if name else typer.main.get_command(app).params
    assert [param.name for param in params if not getattr(param, "help", None)] == []


@pytest.mark.parametrize("name", ["profile", "solve", "pareto", "train", "compare", "max-batch", "advise", "show"])
def test_commands_with_results_take_json(name):
    assert any("--json" in param.opts for param in COMMANDS[name].params)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["solve"], "FILE: it is missing; "),
        (["solve", "x.json", "--budget"], "--budget: its value is missing; "),
        (["compare", "zoo:mlp"], "--budget: it is missing; add it, planner compare -h says more"),
        (["solve", "x.json", "--budget", "much"], "--budget: expected a size such as 8GiB"),
        (["train", "zoo:mlp", "--budget", "much"], "--budget: expected a size such as 8GiB"),
        (["max-batch", "zoo:mlp", "--budget", "50%"], "--budget: expected what the device holds"),
        (["advise", "zoo:mlp"], "--budget: it is missing; "),
        (["profile", "zoo:mlp", "--limit", "-1"], "--limit: expected a size such as 8GiB"),
        (
            ["solve", "x.json", "--headroom", "x"],
            "--headroom: 'x' is neither bytes nor a share of the budget",
        ),
        (["solve", "x.json", "--host-memory", "x"], "--host-memory: expected a size such as 8GiB"),
        (["train", "--steps", "0"], "--steps: expected a number greater than or equal to 1, got '0'; "),
        (["train", "--steps", "few"], "--steps: expected a whole number, got 'few'; "),
        (["solve", "x.json", "--link-gbps", "fast"], "--link-gbps: expected a number, got 'fast'; "),
        (
            ["solve", "--bugdet"],
            "--bugdet: planner solve has no such option; ",
        ),
        (["--nope"], "--nope: planner has no such option; "),
        (["slove"], "COMMAND: expected a command of planner, got 'slove'; did you mean 'solve'?"),
        (["show", "a", "b"], "planner show: expected no further argument, got b; "),
        (["profile", "gpt2"], "TARGET: expected zoo:NAME, "),
        (["profile", "zoo:mlp", "--set", "width=1"], "TARGET zoo:mlp: expected the settings "),
        (["max-batch", "zoo:mlp", "--budget", "1GB", "--vary", "sq"], "TARGET zoo:mlp: expected the settings "),
        (["solve", "x.json", "--link-gbps", "-1"], "--link-gbps: expected a number greater than or equal to 0, got"),
        (["solve", "x.json", "--devices-per-link", "0"], "--devices-per-link: expected a number greater than or equal"),
        (["solve", "x.json", "--time-limit", "0"], "--time-limit: expected seconds above zero, "),
        (["train", "nothing", "--budget", "1GB"], "TARGET: expected zoo:NAME, "),
        (["train", "zoo:mlp", "--shard", "x", "--budget", "1GB"], "--shard: expected ddp or fsdp2, got 'x'; "),
    ],
)
def test_messages_begin_with_the_option_and_stand_in_json_too(args, message):
    assert refused(*args).startswith(message)
    result = run(args[0], "--json", *args[1:])
    document = json.loads(result.stdout)
    assert result.exit_code == 2 and document["message"].startswith(message)
    assert (document["status"], document["option"]) == ("error", option_in(message))
    assert f"error: {document['message']}" in result.stderr


def test_what_python_calls_otherwise_is_named_as_the_option():
    params = COMMANDS["solve"].params
    said = "expected seconds above zero, got 0.0; leave it out"
    assert naming_option(f"a time limit: {said}", params) == f"--time-limit: {said}"
    assert naming_option(f"apply: {said}", params) == f"apply: {said}"


@pytest.mark.parametrize(
    ("target", "remedy"), [("gpt2", "did you mean zoo:gpt2?"), ("my.py", "add its function, as my.py:build")]
)
def test_half_a_target_is_completed(target, remedy):
    assert f"got '{target}'; {remedy}" in refused("profile", target)


def test_a_warning_that_no_line_of_the_user_s_caused_is_a_plain_line(capsys, monkeypatch):
    monkeypatch.setattr(output.warnings, "showwarning", lambda *given: seen.append(given))
    seen = []
    Output().show_warnings_plainly()
    warnings.warn_explicit("another forward", RuntimeWarning, str(typer.main.__file__), 1)
    assert capsys.readouterr().err == "warning: another forward\n" and not seen
    warnings.warn_explicit("of the user's", RuntimeWarning, "own.py", 1)
    assert len(seen) == 1


def test_with_json_there_is_a_document_with_exit_code_3_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("train", *TINY, "--budget", "1KiB", "--json", "-q")
    document = json.loads(result.stdout)
    assert result.exit_code == 3
    assert (document["status"], document["option"]) == ("infeasible", "--budget")
    assert document["minimum_budget_bytes"] > document["budget_bytes"] == 1024
    assert result.stderr == f"infeasible: {document['message']}\n"


def test_quiet_leaves_errors_alone_on_stderr(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert done("profile", *TINY, "--no-menus", "-q").stderr == ""
    assert done("-q", "profile", *TINY, "--no-menus").stderr == ""
    assert refused("profile", "zoo:nothing", "--quiet").startswith("TARGET: expected one of gpt2")
    assert "written: " in done("profile", *TINY, "--no-menus").stderr


def test_quiet_says_nothing_of_what_the_target_prints(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert done("profile", f"{own}:talks", "--no-menus", "-q").stderr == ""
    assert "hello from the target" in done("profile", f"{own}:talks", "--no-menus").stderr


def test_a_folder_that_cannot_be_written_to_is_refused_before_any_work(tmp_path, monkeypatch):
    opened = os.open

    def denied(path, flags, *more, **named):
        if flags & os.O_CREAT and str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(json_files.os, "open", denied)
    assert "expected a folder that can be written to" in refused("profile", *TINY, "-o", tmp_path / "p.json")
    assert run("profile", *TINY, "-o", tmp_path / "p.json").stderr.startswith("error: ")  # No progress before.


def test_verbose_has_a_line_for_each_part_of_the_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, verbose = (done("profile", *TINY, "--no-menus", *flag).stderr for flag in ((), ("-v",)))
    assert all(f"  {part}  " in verbose for part in ("warm up", "trace", "memory", "time"))
    assert verbose.count("\n") > plain.count("\n")


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        TARGETS + "\ndef inner():\n    raise KeyError('no such data')\n\ndef outer():\n    return inner()\n"
    )
    return path


def test_a_target_that_raises_shows_its_own_line_and_all_of_them_on_request(own):
    line = own.read_text().splitlines().index("    raise KeyError('no such data')") + 1
    said = refused("profile", f"{own}:outer")
    assert f"\n  at {own}:{line}, in inner: raise KeyError('no such data')\n" in said
    result = run("profile", f"{own}:outer", "--traceback")
    assert "Traceback" in result.stderr and "in outer" in result.stderr and "in call_target" in result.stderr


def test_a_forward_that_raises_shows_its_own_line_too(own):
    assert re.search(
        rf"\n  at {own}:\d+, in forward: raise RuntimeError\(\"these shapes clash\"\)",
        refused("profile", f"{own}:broken"),
    )


def test_a_file_that_does_not_parse_shows_the_line(own):
    own.write_text("def build(:\n")
    assert f"\n  at {own}:1: def build(:" in refused("profile", f"{own}:build")


def test_a_hyphen_reads_standard_input(files):
    profile, plan = ((files / name).read_text() for name in ("profile.json", "plan.json"))
    solved = CliRunner().invoke(app, ["solve", "-", "--budget", "85%", "--json"], input=profile)
    shown = CliRunner().invoke(app, ["show", "-", "--json"], input=plan)
    assert json.loads(solved.stdout)["predicted_peak_bytes"] == json.loads(shown.stdout)["predicted_peak_bytes"]
    broken = CliRunner().invoke(app, ["show", "-"], input="{")
    assert broken.exit_code == 2 and "standard input: expected a whole JSON document" in broken.stderr


def test_show_and_pareto_print_documents(files):
    profile = json.loads(done("show", files / "profile.json", "--json").stdout)
    rows = json.loads(done("pareto", files / "profile.json", "--json").stdout)["rows"]
    none = next(row for row in rows if row["solver"] == "none")
    assert none["peak_bytes"] == profile["unplanned_peak_bytes"]
