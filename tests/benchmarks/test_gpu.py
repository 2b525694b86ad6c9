"""The parts of the GPU run: all of their logic at a tiny size on the CPU; what a device measures is not known here."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from benchmarks import gpu, gpu_llama, gpu_offload, gpu_tests, peer_methods, rehearsal
from benchmarks.evidence import running
from planner import zoo
from tests.support.nightly import by_day

PARTS = {part.name: part for part in gpu.parts()}


@pytest.mark.parametrize("form", ["quick", "full"])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_takes_its_arguments(name, form, monkeypatch):
    """It stops where its options are read; a table of its own is kept."""
    import argparse

    class Read(Exception):
        pass

    read = argparse.ArgumentParser.parse_args

    def stopped(parser: argparse.ArgumentParser, *rest: object) -> None:
        read(parser, *rest)  # type: ignore[arg-type]
        raise Read

    arguments = running.arguments_of(PARTS[name], form)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stopped)
    monkeypatch.setattr(sys, "argv", [arguments[1], *arguments[2:], "--out", "build"])
    with pytest.raises(Read):
        importlib.import_module(arguments[1]).main()


EACH = [part.name for part in gpu.one_of_each(PARTS.values())]


@pytest.mark.slow
@pytest.mark.parametrize("name", by_day(EACH, ["offload-overlap-gpt2"]))
def test_a_part_of_each_kind_is_rehearsed_on_the_cpu(name, tmp_path, capsys):
    assert gpu.main(["--rehearse", "--parts", name, "--out", str(tmp_path)]) == 0
    assert "all parts work" in capsys.readouterr().out
    assert list((tmp_path / name).glob("*.csv"))


def test_a_part_that_fails_or_writes_nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal.importlib, "import_module", lambda name: SimpleNamespace(main=lambda: None))
    said = []
    assert rehearsal.rehearse([PARTS["nested"]], tmp_path, said.append) == ["nested"]
    assert "it wrote no table" in said[0]


def test_rehearsed_models_are_tiny():
    with rehearsal.tiny_models():
        small = zoo.build("gpt2", layers=12, hidden=768)
    assert sum(p.numel() for p in small.model.parameters()) < 40_000
    larger = zoo.build("gpt2", layers=3, hidden=64)
    assert sum(p.numel() for p in larger.model.parameters()) > 3 * 12 * 64**2


def test_no_two_parts_write_the_same_table():
    kept = [table.name for part in PARTS.values() for table in part.tables]
    assert len(kept) == len(set(kept)) == len(PARTS)


def test_there_is_a_part_for_each_file_of_tests():
    tests = {path.stem for path in (gpu.ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {f"test_{name.removeprefix('tests-')}" for name in PARTS if name.startswith("tests-")} == tests


def test_without_a_device_nothing_runs_and_that_is_said(capsys):
    if gpu.torch.cuda.is_available():
        pytest.skip("there is a device")
    assert gpu.main(["--parts", "overhead"]) == 0
    assert "no CUDA device here; nothing was run" in capsys.readouterr().out


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--parts", "gone"])
    assert stopped.value.code == 2 and "expected" in capsys.readouterr().err


def test_after_the_time_for_all_none_begins(tmp_path):
    said = []
    parts = [PARTS["overhead"], PARTS["nested"]]
    left = running.run_all(parts, "quick", work=tmp_path, results=tmp_path, all_seconds=1, say=said.append)
    assert left == ["overhead", "nested"] and all("no time is left" in line for line in said)


def test_outcomes_of_tests_become_rows(tmp_path):
    report = tmp_path / "junit.xml"
    cases = '<testcase name="a"/><testcase name="b"><failure message="no&#10;more">x</failure></testcase>'
    cases += '<testcase name="c"><skipped message="no device"/></testcase>'
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    rows = gpu_tests.outcomes(report).to_dict("records")
    assert [(row["test"], row["outcome"], row["why"]) for row in rows] == [
        ("a", "passed", ""),
        ("b", "failure", "no"),
        ("c", "skipped", "no device"),
    ]


def test_offload_is_held_against_what_torch_sends_at_its_peak():
    frame = pd.DataFrame(gpu_offload.rows_of("gpt2", "cpu", True, 1)).set_index("way")
    assert {"plain", "save_on_cpu", "our plan, offload auto"} <= set(frame.index)
    ours = frame[frame.predicted_peak_MiB.notna()]
    assert (ours.peak_MiB <= frame.peak_MiB["save_on_cpu"]).all()
    assert frame.over_save_on_cpu["save_on_cpu"] == 1


@pytest.mark.nightly
def test_a_llama_that_does_not_fit_gets_a_plan_or_its_reason(monkeypatch):
    settings = {**gpu_llama.TINY, **gpu_llama.TRAINED, "batch": 2, "device": "cpu"}
    rows = {row["way"]: row for row in gpu_llama.rows_of(settings, 300_000, False)}
    assert set(rows) == {"no plan", "plan, auto", "plan, recompute_all", "every block checkpointed"}
    planned = rows["plan, auto"]
    assert planned["measured_peak_MiB"] <= planned["predicted_peak_MiB"] <= 300_000 / 2**20
    assert rows["every block checkpointed"]["measured_peak_MiB"] < rows["no plan"]["measured_peak_MiB"]
    too_little = {row["way"]: row for row in gpu_llama.rows_of(settings, 1000, False)}
    assert "1000" in too_little["plan, auto"]["said"]


def test_running_out_of_memory_is_a_row(monkeypatch):
    def out_of_memory(workload):
        raise MemoryError

    monkeypatch.setattr(gpu_llama.planner, "measure", out_of_memory)
    workload = peer_methods.Workload(model=gpu_llama.torch.nn.Linear(1, 1), inputs=gpu_llama.torch.ones(1, 1))
    assert gpu_llama._row("no plan", 1, workload) == {"way": "no plan", "said": "out of memory"}
