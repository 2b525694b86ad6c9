"""Device files: seconds by hand, kinds that stand in for others, and the cards that come with the package."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from profiler.device_record import (
    DeviceRecord,
    EstimateRecord,
    LinkRecord,
    NetworkRecord,
    OpRate,
    device_names,
    is_card,
)

CARDS = {"a100-40gb", "a100-80gb", "h100", "h200", "l4", "l40s", "rtx3090", "rtx4090", "t4", "v100-32gb"}


def device(*rates: OpRate, **fields: Any) -> DeviceRecord:
    return DeviceRecord(
        **{"name": "d", "kind": "cpu", "memory_bytes": 1000, "origin": "calibrated", **fields}, rates=rates
    )


def test_a_rate_without_points_is_the_slower_of_launch_and_work() -> None:
    rate = OpRate(kind="matmul", per_second=1000.0, reached=0.5, launch_seconds=0.1)
    assert rate.seconds(10) == 0.1 and rate.seconds(50) == 0.1
    assert rate.seconds(200) == pytest.approx(0.4)
    assert OpRate(kind="matmul", launch_seconds=0.1).seconds(1e9) == 0.1
    assert OpRate(kind="matmul").seconds(1e9) == 0.0


def test_between_points_seconds_are_those_of_a_straight_line_on_logarithmic_paper() -> None:
    rate = OpRate(kind="memory", per_second=1.0, points=((100.0, 1.0), (10_000.0, 4.0), (40_000.0, 8.0)))
    assert rate.seconds(0) == rate.seconds(100) == 1.0, "below the first point nothing gets faster"
    assert rate.seconds(1000) == pytest.approx(2.0), "half of the way to a hundredfold: half of the way to fourfold"
    assert rate.seconds(10_000) == pytest.approx(4.0)
    assert rate.seconds(20_000) == pytest.approx(4 * 2**0.5)
    assert rate.seconds(40_000) == 8.0 and rate.seconds(120_000) == 24.0, "beyond the last point in proportion"


def test_a_kind_without_rates_is_as_fast_as_the_next_similar_one() -> None:
    of = [
        ("matmul", "float32"),
        ("matmul", "bfloat16"),
        ("memory", ""),
        ("normalization", ""),
        ("convolution", "float32"),
    ]
    known = device(*(OpRate(kind=kind, dtype=dtype) for kind, dtype in of))

    def found(kind: str, dtype: str) -> tuple[str, str]:
        rate = known.rate_of(kind, dtype)
        return rate.kind, rate.dtype

    assert found("matmul", "bfloat16") == ("matmul", "bfloat16")
    assert found("matmul", "float64") == ("matmul", "float32"), "of a type that is not named: the first"
    assert found("attention_backward", "bfloat16") == found("attention", "bfloat16") == ("matmul", "bfloat16")
    assert found("convolution_backward", "float32") == ("convolution", "float32")
    assert found("grouped_convolution_backward", "float32") == ("convolution", "float32")
    assert found("grouped_convolution", "bfloat16") == ("matmul", "bfloat16")
    assert found("batch_norm_backward", "float32") == found("batch_norm", "int64") == ("normalization", "")
    assert found("softmax", "float32") == found("gelu", "float32") == found("no such kind", "") == ("memory", "")
    assert device().rate_of("attention", "float32").seconds(1e12) == 0.0
    assert device().rate_of("softmax", "float32").seconds(1e12) == 0.0


def test_the_pace_of_an_op_is_that_of_steps_times_its_own() -> None:
    known = device(op_paces=(("mm", ((10.0, 1.5), (1000.0, 0.375))),), pace=2.0)
    assert known.pace_of("add", 10.0) == 2.0
    for work, pace in ((1.0, 3.0), (10.0, 3.0), (100.0, 1.5), (1000.0, 0.75), (1e9, 0.75)):
        assert known.pace_of("mm", work) == pytest.approx(pace)


@pytest.mark.parametrize("points", [((2.0, 1.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 2.0)), ((0.0, 1.0),), ((1.0, -1.0),)])
def test_points_that_no_line_goes_through_are_refused(points: Any) -> None:
    with pytest.raises(ValueError, match="points of matmul: expected pairs of numbers above 0"):
        OpRate(kind="matmul", points=points)
    with pytest.raises(ValueError, match="points of mm: expected pairs"):
        device(op_paces=(("mm", points),))


def test_a_ring_sends_all_but_a_part() -> None:
    network = NetworkRecord(
        bytes_per_second=100.0,
        ranks_per_machine=4,
        between_bytes_per_second=10.0,
        latency_seconds=0.5,
        reached=0.5,
    )
    assert network.seconds(800, 2) == pytest.approx(0.5 + 400 / 50)
    assert network.seconds(800, 4) == pytest.approx(0.5 + 600 / 50)
    assert network.seconds(800, 8) == pytest.approx(0.5 + 700 / 20), "four ports of 10 between machines"
    fast = dataclasses.replace(network, between_bytes_per_second=1000.0)
    assert fast.seconds(800, 8) == pytest.approx(0.5 + 700 / 50), "then the links within a machine are the slowest"
    assert dataclasses.replace(network, bytes_per_second=0.0).seconds(800, 4) == 0.5


def test_a_device_is_saved_and_loaded_as_it_is(tmp_path: Path) -> None:
    saved = device(
        OpRate(kind="matmul", dtype="float32", points=((1.0, 2.0), (3.0, 4.0)), source="measured"),
        OpRate(kind="memory", per_second=3.0, reached=0.25),
        kind="cuda",
        context_bytes=300,
        op_paces=(("mm", ((10.0, 1.5),)),),
        pace=1.25,
        least_seconds=0.5,
        most_seconds=2.0,
        link=LinkRecord(to_host_bytes_per_second=1.0, to_device_bytes_per_second=2.0),
        network=NetworkRecord(bytes_per_second=5.0),
        sources=("a", "b"),
    )
    path = tmp_path / "device.json"
    saved.save(path)
    assert DeviceRecord.load(path) == saved == DeviceRecord.named(str(path))
    assert saved.budget_bytes == 700
    document = json.loads(path.read_text())
    assert (document["format"], document["version"]) == ("planner-device", 1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format": "planner-plan"}, "planner-device"),
        ({"version": 99}, "expected planner-device version 1, got 99"),
        ({"kind": "tpu"}, "this is no device file: .*tpu.*; write one with planner calibrate"),
        ({"rates": [{"kind": "matmul", "reached": 2.0}]}, "this is no device file"),
        ({"rates": [{"dtype": "float32"}]}, "this is no device file: .*kind"),
        ({"memory_bytes": -1}, "this is no device file"),
        ({"memory_bytes": None}, "this is no device file"),
    ],
)
def test_wrong_files_are_refused_in_words(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    device().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ValueError, match=said) as refused:
        DeviceRecord.load(path)
    assert "device.json" in str(refused.value)


def test_what_is_no_file_and_no_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no card 'h1000'; use .*h100, .*or a file that `planner calibrate"):
        DeviceRecord.named("h1000")
    with pytest.raises(ValueError, match="missing.json"):
        DeviceRecord.named(str(tmp_path / "missing.json"))
    text = tmp_path / "text.json"
    text.write_text("no JSON")
    with pytest.raises(ValueError, match="text.json"):
        DeviceRecord.named(str(text))
    assert DeviceRecord.named("H100") == DeviceRecord.named("h100")


def test_the_cpu_at_hand_has_its_memory_and_assumed_speeds() -> None:
    cpu = DeviceRecord.named("cpu")
    assert (cpu.kind, cpu.origin, cpu.budget_bytes) == ("cpu", "assumed", psutil.virtual_memory().total)
    assert not is_card("cpu"), "max-batch and advise measure on it"


def test_the_packaged_cards() -> None:
    assert set(device_names()) == CARDS
    names = [DeviceRecord.named(card).name for card in device_names()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("card", sorted(CARDS))
def test_each_number_of_a_card_has_its_source(card: str) -> None:
    known = DeviceRecord.named(card)
    assert known.kind == "cuda" and known.origin == "data sheet"
    assert 0 < known.context_bytes < known.memory_bytes / 10
    nominal = re.search(r"(\d+) ?GB", known.name)
    if nominal:
        assert 0.85 < known.memory_bytes / (int(nominal[1]) * 2**30) <= 1.01
    assert known.least_seconds < 1 < known.most_seconds
    for rate in known.rates:
        assert rate.source and 0 < rate.reached < 1 and rate.per_second > 1e11 and 1e-6 < rate.launch_seconds < 1e-4
    assert {"matmul", "memory", "convolution", "attention"} <= {rate.kind for rate in known.rates}
    assert any(line.startswith("data sheet: https://") for line in known.sources)
    for field in ("memory_bytes", "context_bytes", "launch_seconds", "reached", "least_seconds"):
        assert any(field in line.partition(": ")[0] for line in known.sources), field
    assert known.link is not None and any(line.startswith("link: ") for line in known.sources)
    assert known.network is not None and known.network.source
    halves = known.rate_of("matmul", "float16").per_second
    assert halves > known.rate_of("matmul", "float32").per_second > known.rate_of("memory", "").per_second


def test_an_estimate_says_what_it_stands_on() -> None:
    estimate = EstimateRecord(
        device="NVIDIA X", origin="data sheet", memory_bytes=5, least_seconds=0.7, most_seconds=1.6
    )
    assert estimate.in_words() == "for NVIDIA X, from its data sheet; the time may be 0.7 to 1.6 times as long"
    wide = dataclasses.replace(estimate, origin="calibrated", margin_bytes=12_345, margin="workspaces")
    assert "from ops timed on it" in wide.in_words() and "the peak 12,345 bytes higher: workspaces" in wide.in_words()
