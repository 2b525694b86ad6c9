"""The list of benchmarks: complete, honest about its age, and what its pages are written from."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import all as every_benchmark
from benchmarks.evidence import fingerprints, running, states
from benchmarks.evidence.benchmark_list import BENCHMARKS
from benchmarks.evidence.fingerprints import files_of, fingerprint
from benchmarks.evidence.listing import Benchmark, Table
from benchmarks.evidence.page import DOCS, PAGES, results_page
from benchmarks.evidence.peers_page import peers_page, why_slower
from benchmarks.evidence.states import (
    FRESH,
    MISSING,
    OLDER,
    UNKNOWN,
    ResultFile,
    minutes_taken,
    result_of,
    state_of,
)
from benchmarks.reporting import UNFINISHED, write_rows

LISTED = {table.name: (each, table) for each in BENCHMARKS.values() for table in each.tables}
TABLES = {name: (each, table) for name, (each, table) in LISTED.items() if result_of(table).exists}

# The list


def test_every_result_file_is_in_the_list_once():
    found = [path.relative_to(states.RESULTS).with_suffix("").as_posix() for path in states.RESULTS.rglob("*.csv")]
    listed = [table.name for each in BENCHMARKS.values() for table in each.tables]
    assert set(found) <= set(listed) and len(listed) == len(set(listed))


@pytest.mark.parametrize("name", TABLES)
def test_a_result_was_made_by_the_command_of_the_list(name):
    benchmark, table = TABLES[name]
    assert result_of(table).command == benchmark.command


@pytest.mark.slow
@pytest.mark.parametrize("form", ["quick", "full"])
@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=lambda each: each.name)
def test_a_benchmark_takes_the_arguments_of_the_list(benchmark, form, monkeypatch):
    """Nothing is measured: it stops where its options are read."""
    if form == "quick" and benchmark.quick is None:
        pytest.skip("another one's quick run shows it")
    import argparse

    class Read(Exception):
        pass

    read = argparse.ArgumentParser.parse_args

    def stopped(parser: argparse.ArgumentParser, *rest: object) -> None:
        read(parser, *rest)  # type: ignore[arg-type]
        raise Read

    arguments = running.arguments_of(benchmark, form)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stopped)
    monkeypatch.setattr(sys, "argv", [arguments[1], *arguments[2:], "--out", "build"])
    module = importlib.import_module(arguments[1])
    module = importlib.import_module(f"{arguments[1]}.__main__") if hasattr(module, "__path__") else module
    with pytest.raises(Read):
        module.main()


# Fingerprints

SOURCES = {
    "benchmarks/speed.py": '"""Speed."""\nimport planner\nfrom benchmarks.reporting import x\n'
    "from solvers.chain import rotor\nplanner.solve(1)\n",
    "benchmarks/reporting.py": "x = 1\n",
    "planner/__init__.py": "if TYPE_CHECKING:\n    from planner.plans.solving import solve as solve\n"
    "    from planner.cli.shell import show as show\n",
    "planner/plans/__init__.py": "",
    "planner/plans/solving.py": "def solve(x):\n    from profiler.records import Profile\n    return Profile\n",
    "planner/cli/shell.py": "show = print\n",
    "profiler/records.py": "class Profile:\n    pass\n",
    "solvers/chain/__init__.py": "",
    "solvers/chain/rotor.py": "# fast\nx = 2\n",
}


def test_a_benchmark_depends_on_what_it_imports_however_deep_and_late():
    assert files_of("benchmarks.speed", SOURCES.get) == [
        "benchmarks/speed.py",
        "planner/plans/__init__.py",
        "planner/plans/solving.py",
        "profiler/records.py",
        "solvers/chain/__init__.py",
        "solvers/chain/rotor.py",
    ]


@pytest.mark.parametrize(
    ("path", "text", "changes"),
    [
        ("profiler/records.py", "class Profile:\n    bytes = 0\n", True),
        ("solvers/chain/rotor.py", "x = 3\n", True),
        ("benchmarks/speed.py", "import planner\n", True),
        ("solvers/chain/rotor.py", '"""Says."""\n\nx = 2  # two\n', False),
        ("planner/cli/shell.py", "show = 1\n", False),
        ("benchmarks/reporting.py", "x = 2\n", False),
    ],
)
def test_a_fingerprint_changes_with_the_statements_that_a_benchmark_depends_on(path, text, changes):
    now = {**SOURCES, path: text}
    assert (fingerprint("benchmarks.speed", now.get) != fingerprint("benchmarks.speed", SOURCES.get)) is changes


def test_a_benchmark_depends_on_the_solvers_and_the_runtime_that_it_measures():
    assert "solvers/chain/rotor.py" in files_of("benchmarks.chain_solvers")
    assert {"planner/runtime/applier.py", "profiler/measurement/meter.py"} <= set(files_of("benchmarks.fidelity"))
    assert "planner/cli/commands.py" not in files_of("benchmarks.fidelity")


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"expected a module of planner.*, got benchmarks\.gone"):
        fingerprint("benchmarks.gone")


# States and pages

OVERHEAD = BENCHMARKS["overhead"]


def written(folder: Path, code: str) -> None:
    text = "# T\n\n- command: `python -m benchmarks.overhead --rounds 9`\n- date: 2026-01-02\n" + code
    (folder / "overhead.md").write_text(text, encoding="utf-8")
    (folder / "overhead.csv").write_text("model,planned_over_plain\ngpt2,1.01\n", encoding="utf-8")


def test_a_result_is_fresh_only_with_the_fingerprint_of_todays_code(tmp_path):
    table = OVERHEAD.tables[0]
    assert state_of(OVERHEAD, table, tmp_path) == MISSING
    for code, state in [
        ("", UNKNOWN),
        ("- code: 0123456789ab\n", OLDER),
        (f"- code: {fingerprint('benchmarks.overhead')}\n", FRESH),
    ]:
        written(tmp_path, code)
        assert state_of(OVERHEAD, table, tmp_path) == state


def test_a_result_without_a_fingerprint_gets_that_of_its_commit(tmp_path, monkeypatch):
    written(tmp_path, "")
    monkeypatch.setattr(states, "_commit_of", lambda result: "abc1234")
    monkeypatch.setattr(states, "of_commit", lambda commit: fingerprints.working_tree)
    assert states.derive_missing(tmp_path) == ["overhead"]
    result = ResultFile(tmp_path / "overhead.md")
    assert result.fact("code") == f"{fingerprint('benchmarks.overhead')} (derived: of commit abc1234)"
    assert states.derive_missing(tmp_path) == []


def test_every_result_says_what_code_it_measured():
    assert [
        name for name, (_, table) in TABLES.items() if not re.fullmatch("[0-9a-f]{12}", result_of(table).code)
    ] == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_command_writes(name):
    """But for the words on its age, which are those of the day on which it was written."""
    committed = (DOCS / name).read_text(encoding="utf-8")
    assert ageless(committed) == ageless(PAGES[name]()), "run python -m benchmarks.all --page"


def ageless(text: str) -> str:
    return re.sub(rf"\b({FRESH}|{OLDER})(?= \|$|\.$)", "AGE", text, flags=re.M)


def test_the_page_says_what_is_not_measured(tmp_path):
    text = results_page(tmp_path)
    assert text.count("| not measured |") == len(LISTED)


def test_minutes_are_those_of_the_last_table_that_a_command_wrote(tmp_path):
    tables = tuple(Table(name=name, what="", says=str) for name in ("first", "last"))
    listed = Benchmark(name="two", module="", full="", quick=None, tables=tables)
    assert minutes_taken(listed, tmp_path) == "?"
    for table, seconds in zip(tables, (60, 629), strict=True):
        (tmp_path / f"{table.name}.csv").write_text("a", encoding="utf-8")
        line = f"- date: 2026-11-29; this command had taken {seconds} s\n"
        (tmp_path / f"{table.name}.md").write_text(line, encoding="utf-8")
    assert minutes_taken(listed, tmp_path) == "10"


# Running


def fake(name: str, module: str, tables: tuple[Table, ...] = (), **more: str | None) -> Benchmark:
    return Benchmark(name=name, module=module, full="", quick=more.get("quick", ""), tables=tables)


@pytest.fixture
def writes(tmp_path, monkeypatch):
    """Benchmarks that write a table, or fail, without measuring anything."""
    started = []

    def run(command, stream, limit_seconds):
        module, folder = command[2], Path(command[-1])
        started.append(module)
        if "slow" in module:
            (folder / "speed.csv").write_text("a row", encoding="utf-8")
            (folder / "speed.md").write_text("a row", encoding="utf-8")
            return None
        if "fails" in module:
            stream.write(b"no memory left\n")
            return 1
        for ending in (".md", ".csv"):
            (folder / f"speed{ending}").write_text(f"{module}\n", encoding="utf-8")
        return 0

    monkeypatch.setattr(running, "exit_code", run)
    monkeypatch.setattr(running, "code_today", lambda module: "0" * 12)
    return started


def test_a_failure_does_not_stop_the_others_and_what_is_done_is_not_done_again(tmp_path, writes):
    table = Table(name="speed-60", written_as="speed", what="speed", says=str)
    chosen = [fake("bad", "fails"), fake("good", "works", (table,))]
    said: list[str] = []
    places = {"work": tmp_path / "work", "results": tmp_path / "results"}
    assert running.run_all(chosen, "full", **places, say=said.append) == ["bad"]
    assert "no memory left" in "\n".join(said)
    assert (tmp_path / "results" / "speed-60.csv").read_text() == "works\n"
    assert running.run_all(chosen, "full", **places, say=said.append) == ["bad"]
    assert writes == ["fails", "works", "fails"]
    assert json.loads((tmp_path / "work" / "full" / "good" / "done.json").read_text())["code"] == "0" * 12


def test_a_benchmark_that_writes_too_little_replaces_nothing(tmp_path, writes):
    (tmp_path / "speed.csv").write_text("before", encoding="utf-8")
    tables = tuple(Table(name=name, what="", says=str) for name in ("speed", "memory"))
    said: list[str] = []
    failed = running.run_all([fake("half", "works", tables)], "full", work=tmp_path, results=tmp_path, say=said.append)
    assert failed == ["half"] and "did not write memory.csv" in said[-1]
    assert (tmp_path / "speed.csv").read_text() == "before"


@pytest.mark.parametrize("partial", [False, True])
def test_what_was_written_when_the_time_was_over_is_kept_on_request_and_made_again(tmp_path, writes, partial):
    chosen = [fake("long", "slow", (Table(name="speed-60", written_as="speed", what="", says=str),))]
    said: list[str] = []
    places = {"work": tmp_path / "work", "results": tmp_path / "results", "say": said.append}
    for _ in range(2):
        assert running.run_all(chosen, "full", **places, limit_seconds=5.0, partial=partial) == ["long"]
        assert "took more than 5 s" in said[-1]
        assert (tmp_path / "results" / "speed-60.csv").is_file() is partial
    assert writes == ["slow", "slow"]


def test_rows_are_written_as_they_come(tmp_path, capsys):
    def rows():
        yield {"a": 1}
        assert UNFINISHED in (tmp_path / "t.md").read_text() and (tmp_path / "t.csv").read_text() == "a,b\n1,\n"
        yield {"a": 2, "b": 3}

    write_rows(tmp_path, "t", "Title", rows(), lambda found: [f"rows: {len(found)}"], ["a", "b"])
    text = (tmp_path / "t.md").read_text()
    assert UNFINISHED not in text and "rows: 2" in text and "| 2 | 3 |" in text
    assert capsys.readouterr().out == text + "\n"
    assert (tmp_path / "t.csv").read_text() == "a,b\n1,\n2,3.0\n"


def test_the_quick_form_replaces_no_result(tmp_path, writes):
    chosen = [fake("good", "works", (Table(name="speed", what="", says=str),)), fake("long", "works", quick=None)]
    assert running.run_all(chosen, "quick", work=tmp_path / "work", results=tmp_path / "results", say=print) == []
    assert writes == ["works"] and not (tmp_path / "results").exists()


def test_what_takes_too_long_is_ended_with_all_that_it_has_started(tmp_path):
    inner = "import time; print('inner', flush=True); time.sleep(60)"
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    read, write = os.pipe()
    with open(write, "wb") as stream:
        assert running.exit_code([sys.executable, "-c", command], stream, 3.0) is None
    with open(read, "rb") as output:  # It ends when nobody is left who could write.
        begin = time.perf_counter()
        assert output.read() == b"inner\n"
        assert time.perf_counter() - begin < 20
    with (tmp_path / "log.txt").open("wb") as stream:
        assert running.exit_code([sys.executable, "-c", "raise SystemExit(3)"], stream, 60.0) == 3


def test_a_name_that_is_not_in_the_list_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        every_benchmark.main(["--list", "--only", "gone"])
    assert stopped.value.code == 2
    assert "expected names of --list, got gone" in capsys.readouterr().err


def test_the_check_fails_where_a_result_is_older(capsys, monkeypatch):
    monkeypatch.setattr(every_benchmark, "changed_files", lambda *_: ["planner/units.py"])
    monkeypatch.setattr(every_benchmark, "state_of", lambda *_: OLDER)
    assert every_benchmark.main(["--check", "--only", "overhead"]) == 1
    assert "overhead: older than the code, 1 files changed, as planner/units.py" in capsys.readouterr().out
    assert every_benchmark.main(["--stale", "--only", "overhead"]) == 0
    monkeypatch.setattr(every_benchmark, "state_of", lambda *_: FRESH)
    assert every_benchmark.main(["--check", "--only", "overhead"]) == 0


# Peers


def test_a_row_that_we_lose_stays_and_says_why(tmp_path):
    head = (
        "model,peer,setting,peer_peak_MiB,plan_peak_MiB,plan_over_peer,peer_slowdown,plan_predicted_slowdown,plan_gap\n"
    )
    rows = "gpt2,plain,,9,9,0.97,1,1,0\nbert,checkpoint,,8,7,1.5,1.2,1.1,0\nunet,compiled,,8,7,1.4,1.1,1.3,0.02\n"
    (tmp_path / "peers.csv").write_text(head + rows + "llama,transformers,x,8,7,1.02,1.2,1.3,0\n", encoding="utf-8")
    (tmp_path / "peers.md").write_text("- command: `c`\n- date: 2026-01-02\n- code: 0\n", encoding="utf-8")
    text = peers_page(tmp_path)
    assert "As fast or faster in 1 of 4 rows." in text
    assert "| bert | checkpoint | 8.0 | 7.0 | 1.500 | predicted 1.10 of the plain step, took longer" in text
    assert (
        "1.400 | no better plan of stages was found: 1.30 of the plain step predicted, 2.0% above its bound |" in text
    )
    assert "1.020 | within 3 %" in text
    assert "| transformers' gradient checkpointing | – | – | 1 | – | – |" in text
    assert text.count("Not measured yet") == 1


def test_a_plan_that_does_not_fit_is_said():
    assert why_slower(float("nan"), 0.1, {}) == "no plan of ours fits"


def test_files_of_a_commit_are_read_whatever_links_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "planner"
    package.mkdir()
    (package / "code.py").write_text("x = 1\n")
    (package / "words.md").symlink_to("../elsewhere.md")
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(fingerprints, "ROOT", tmp_path)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True)
    read = fingerprints.of_commit(commit.stdout.strip())
    assert (read("planner/code.py"), read("planner/words.md")) == ("x = 1\n", None)
