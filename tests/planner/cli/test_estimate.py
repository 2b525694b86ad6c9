"""The commands ``estimate`` and ``calibrate``: tables, documents, files and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli.tables import held_by_allocator
from planner.training.estimated_run import AllocatorRun, EstimatedRun
from planner.units import format_seconds
from profiler.device_record import DeviceRecord, LinkRecord, OpRate, device_names
from profiler.measurement import calibration
from tests.support.command_line import SMALL, SOLVE_KEYS, done, refused, run

GIB = 2**30
CARD = DeviceRecord(
    name="A card of paper",
    kind="cuda",
    memory_bytes=2 * GIB,
    context_bytes=GIB,
    origin="data sheet",
    least_seconds=0.5,
    most_seconds=3.0,
    rates=(OpRate(kind="matmul", per_second=1e12), OpRate(kind="memory", per_second=1e11, launch_seconds=1e-5)),
    link=LinkRecord(to_host_bytes_per_second=1e9, to_device_bytes_per_second=1e9),
)
TARGET = ["zoo:mlp", *SMALL]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file of a card, and a plan and a profile that are estimated for it."""
    folder = tmp_path_factory.mktemp("estimated")
    CARD.save(folder / "card.json")
    outputs = ["-o", folder / "plan.json", "-o", folder / "mlp.profile.json"]
    printed = done("estimate", *TARGET, "--device", folder / "card.json", "--budget", "60%", *outputs, "--json")
    (folder / "printed.json").write_text(printed.stdout)
    (folder / "said.txt").write_text(printed.stderr)
    return folder


@pytest.mark.slow
def test_the_document_is_that_of_solve_and_says_that_it_is_estimated(written: Path, files: Path) -> None:
    document = json.loads((written / "printed.json").read_text())
    assert document["estimated"] is True and document["estimate"]["device"] == CARD.name
    assert document.keys() >= SOLVE_KEYS
    # What the allocator would hold is known of a plan that ran.
    assert document.pop("allocator")["reserved_bytes"] >= document.pop("allocator_expandable")["reserved_bytes"]
    again = json.loads(done("solve", written / "mlp.profile.json", "--budget", "60%", "--json").stdout)
    assert again.keys() == document.keys() and again["estimated"] is True
    measured = json.loads(done("solve", files / "profile.json", "--budget", "85%", "--json").stdout)
    assert measured.keys() | {"estimated", "estimate"} == document.keys() | {"link", "link_reason"} & measured.keys()
    assert "estimated" not in measured
    assert document["predicted_peak_bytes"] <= document["budget_bytes"] == int(0.6 * document["unplanned_peak_bytes"])


def test_the_files_are_a_plan_and_a_profile(written: Path) -> None:
    plan, profile = planner.Plan.load(written / "plan.json"), planner.Profile.load(written / "mlp.profile.json")
    document = json.loads((written / "printed.json").read_text())
    assert plan.estimate == profile.estimate and profile.estimated
    assert plan.predicted_peak_bytes == document["predicted_peak_bytes"]
    assert profile.target is not None and profile.target.text.startswith("zoo:mlp")
    said = (written / "said.txt").read_text()
    assert "plan.json" in said and "mlp.profile.json" in said
    shown = " ".join(done("show", written / "plan.json").stdout.split())
    assert f"estimated for {CARD.name}" in shown or "estimated for A card" in shown


@pytest.mark.slow
def test_the_table_says_whether_it_fits_what_makes_the_peak_and_how_long_a_step_takes(written: Path) -> None:
    printed = " ".join(done("estimate", *TARGET, "--device", written / "card.json").stdout.split())
    assert f"device {CARD.name}, 1.00 GiB for a step" in printed
    profile = planner.Profile.load(written / "mlp.profile.json")
    assert profile.unplanned_peak_bytes < GIB and ": fits, " in printed and "free" in printed
    for words in ("model states parameters", "optimizer", "without a plan peak", "are activations", "planned peak"):
        assert words in printed
    assert "CUDA's allocator may hold" in printed
    least, most = (format_seconds(times * profile.unplanned_seconds) for times in (0.5, 3.0))
    assert f"a step takes {least} to {most}" in printed
    assert "the time may be 0.5 to 3 times as long" in printed


@pytest.mark.parametrize(
    ("default", "expandable", "said"),
    [
        ({}, {}, ""),
        (
            {"flushes": 2},
            {},
            "is given back 2 times, which takes time: set PYTORCH_ALLOC_CONF=expandable_segments:True",
        ),
        ({"short_bytes": 5}, {"flushes": 1}, "memory may run out by 5 B without them: set PYTORCH_ALLOC_CONF"),
        ({"short_bytes": 5}, {"short_bytes": 3}, "memory may run out, at worst by 3 B: set PYTORCH_ALLOC_CONF"),
    ],
)
def test_an_allocator_for_which_the_device_has_too_little_is_told(default: Any, expandable: Any, said: str) -> None:
    runs = AllocatorRun(reserved_bytes=90, **default), AllocatorRun(reserved_bytes=70, **expandable)
    rows = held_by_allocator(EstimatedRun(peak_bytes=50, default=runs[0], expandable=runs[1]))
    assert rows[0] == ("CUDA's allocator", "may hold 90 B; with expandable segments 70 B")
    assert (said in rows[1][1]) if said else len(rows) == 1
    assert held_by_allocator(EstimatedRun(peak_bytes=50)) == []


@pytest.mark.slow
def test_a_device_without_room_is_told_with_the_smallest_budget(tmp_path: Path) -> None:
    DeviceRecord(
        name="tiny",
        kind="cpu",
        memory_bytes=10_000,
        origin="calibrated",
        rates=(OpRate(kind="memory", per_second=1e9),),
    ).save(tmp_path / "tiny.json")
    result = run("estimate", *TARGET, "--device", tmp_path / "tiny.json", "-o", tmp_path / "plan.json")
    assert result.exit_code == 3
    assert "more than the device has" in " ".join(result.stdout.split())
    assert "infeasible: --device: " in result.stderr and "the smallest" in result.stderr
    assert "a device with more memory" in result.stderr
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_refused_as_by_solve(written: Path, tmp_path: Path) -> None:
    asked = ["--budget", "1KiB", "--json"]
    result = run("estimate", *TARGET, "--device", written / "card.json", *asked, "-o", tmp_path / "own.profile.json")
    of_solve = run("solve", written / "mlp.profile.json", *asked)
    assert result.exit_code == of_solve.exit_code == 3
    document, expected = json.loads(result.stdout), json.loads(of_solve.stdout)
    assert document["estimated"] is True and document["status"] == expected["status"] == "infeasible"
    assert document["minimum_budget_bytes"] == expected["minimum_budget_bytes"] > 1024
    assert document.keys() - {"estimated"} == expected.keys() - {"estimated"}
    assert planner.Profile.load(tmp_path / "own.profile.json").estimated, "what is known is written"


def test_an_unknown_device_lists_the_cards() -> None:
    said = refused("estimate", "zoo:mlp", "--device", "h1000")
    assert "there is no card 'h1000'" in said and all(name in said for name in device_names())
    assert "planner calibrate -o device.json" in said
    assert "missing.json" in refused("estimate", "zoo:mlp", "--device", "missing.json")


def test_a_device_is_asked_for() -> None:
    result = run("estimate", "zoo:mlp")
    assert result.exit_code == 2 and "--device" in result.stderr


def test_ranks_and_how_they_share_the_model_go_together(written: Path) -> None:
    device = ["--device", written / "card.json"]
    assert "would have the whole model" in refused("estimate", "zoo:mlp", *device, "--ranks", "2")
    assert "add --ranks 8" in refused("estimate", "zoo:mlp", *device, "--shard", "ddp")
    assert "expected ddp or fsdp2" in refused("estimate", "zoo:mlp", *device, "--ranks", "2", "--shard", "zero")


def test_outputs_that_are_none_are_refused_before_anything_runs(written: Path, tmp_path: Path) -> None:
    device = ["--device", written / "card.json"]
    for name in ("plan.json", "mlp.profile.json"):
        said = refused("estimate", "zoo:gpt2", *device, "-o", tmp_path / "nowhere" / name)
        assert "nowhere" in said
        twice = refused("estimate", "zoo:gpt2", *device, "-o", tmp_path / name, "-o", tmp_path / f"other-{name}")
        assert "-o" in twice or "--out" in twice


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rank_of_many(written: Path) -> None:
    def estimated(*args: str) -> dict[str, Any]:
        return json.loads(done("estimate", *TARGET, "--device", written / "card.json", *args, "--json").stdout)

    alone, sharded = estimated(), estimated("--ranks", "4", "--shard", "fsdp2")
    assert sharded["resident_bytes"] < alone["resident_bytes"]
    assert sharded["estimated"] is True


def test_calibrate_writes_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = ((1e3, 1e-6), (1e6, 1e-3))
    found = DeviceRecord(
        name="here",
        kind="cpu",
        memory_bytes=GIB,
        origin="calibrated",
        rates=(OpRate(kind="matmul", dtype="float32", points=points), OpRate(kind="memory", points=points)),
    )
    asked: list[Any] = []
    monkeypatch.setattr(calibration, "calibrate", lambda device, progress: asked.append(device) or found)
    path = tmp_path / "device.json"
    table = " ".join(done("calibrate", "-o", path).stdout.split())
    assert DeviceRecord.load(path) == found and asked == [None]
    assert "here, calibrated" in table and "matmul float32" in table and "memory any" in table and "1.0 GFLOP" in table
    document = json.loads(done("calibrate", "-o", path, "--device", "cpu", "--json").stdout)
    assert asked == [None, "cpu"] and document["file"] == str(path) and document["name"] == "here"
    assert "-o" in run("calibrate").stderr or "--output" in run("calibrate").stderr
