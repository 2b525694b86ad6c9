"""A calibration has a rate for each kind of op, with more work at each point, and estimates go by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from profiler.device_record import BY_FLOPS, DeviceRecord
from profiler.measurement import calibration
from profiler.measurement.calibration import calibrate
from profiler.simulation.op_costs import dtype_of, kind_of
from profiler.workload.workload import Workload

SIZES = 3  # of those of each kind, the smallest
CPU = torch.device("cpu")
ANY_TYPE = {
    "elementwise",
    "in_place",
    "copy",
    "fill",
    "gelu",
    "transcendental",
    "softmax",
    "normalization",
    "batch_norm",
}
ANY_TYPE |= {"batch_norm_backward", "reduction", "indexing", "random", "pooling"}


def _small(device: torch.device) -> Workload:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model, torch.randn(256, 64, device=device), loss=lambda y: y.square().mean(), optimizer=optimizer)


@pytest.fixture(scope="module")
def told() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def calibrated(told: list[tuple[str, int, int]]) -> Iterator[DeviceRecord]:
    samples = calibration._samples

    def fewer(device: torch.device) -> Iterator[tuple[str, str, list[int], Sequence[Any]]]:
        for kind, dtype, sizes, makes in samples(device):
            yield kind, dtype, sizes[:SIZES], makes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_samples", fewer)
        patch.setattr(calibration, "_SECONDS", 1e-4)
        patch.setattr(calibration, "_WARM_BYTES", 2**16)
        patch.setattr(calibration, "_COLD_BYTES", 2**18)
        patch.setattr(calibration, "_MOST_SETS", 4)
        patch.setattr(calibration, "_STEPS", 2)
        patch.setattr(calibration, "_LONG_SECONDS", 0.0)
        patch.setattr(calibration, "steps_to_time", lambda device: [_small(device)])
        yield calibrate("cpu", progress=lambda *args: told.append(args))


def test_each_kind_has_a_rate_of_increasing_work(calibrated: DeviceRecord) -> None:
    kinds = {(rate.kind, rate.dtype) for rate in calibrated.rates}
    assert len(kinds) == len(calibrated.rates), "each once"
    for dtype in ("float32", "bfloat16"):
        assert {(kind, dtype) for kind in (*BY_FLOPS, *ANY_TYPE)} <= kinds
    assert ("memory", "") in kinds
    for rate in calibrated.rates:
        works = [work for work, _ in rate.points]
        assert works and works == sorted(set(works)) and works[0] > 0, rate
        assert all(seconds > 0 for _, seconds in rate.points) and rate.source
    memory, elementwise = calibrated.rate_of("memory", ""), calibrated.rate_of("elementwise", "float32")
    assert memory.points == elementwise.points


def test_the_device_is_described(calibrated: DeviceRecord, told: list[tuple[str, int, int]]) -> None:
    assert calibrated.origin == "calibrated" and calibrated.kind == "cpu"
    assert calibrated.name and calibrated.memory_bytes > 2**28 and calibrated.context_bytes == 0
    assert calibrated.least_seconds < 1 < calibrated.most_seconds and calibrated.pace > 0
    paces = dict(calibrated.op_paces)
    assert {"addmm", "gelu", "gelu_backward"} <= paces.keys()
    assert all(pace > 0 and work > 0 for points in paces.values() for work, pace in points)
    assert any(f"torch {torch.__version__}" in line for line in calibrated.sources)
    whats, numbers, totals = zip(*told, strict=True)
    assert "matmul float32" in whats and whats[-1] == "whole steps"
    assert list(numbers) == sorted(numbers) and len(set(totals)) == 1 and numbers[-1] < totals[0]


def test_it_is_saved_and_loaded_and_estimates(calibrated: DeviceRecord, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    calibrated.save(path)
    assert DeviceRecord.load(path) == calibrated
    profile = planner.estimate(lambda: _small(CPU), device=path, menus=False)
    assert profile.estimate is not None and profile.estimate.origin == "calibrated"
    assert profile.device_name == calibrated.name and profile.unplanned_seconds > 0
    assert "from ops timed on it" in profile.estimate.in_words()


def test_samples_are_of_their_kind_and_their_work_grows_with_their_size() -> None:
    for kind, dtype, sizes, makes in calibration._samples(CPU):
        assert sizes == sorted(set(sizes)) and makes
        for make in makes:
            op, args = make(sizes[0])
            assert (kind_of(op, args), dtype_of(args)) == (kind, dtype), op


def test_points_are_in_the_order_of_their_work_and_each_work_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def cloned(size: int) -> tuple[Any, tuple[Any, ...]]:
        return torch.ops.aten.clone.default, (torch.ones(size),)

    monkeypatch.setattr(calibration, "_SECONDS", 1e-4)
    points = calibration._points(CPU, [32, 8, 16, 8], [cloned])
    assert [work for work, _ in points] == [2 * 4 * size for size in (8, 16, 32)]


def test_an_op_that_the_device_has_no_kernel_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(size: int) -> tuple[Any, tuple[Any, ...]]:
        def op(*_: Any) -> Any:
            raise NotImplementedError

        return op, (torch.ones(size),)

    monkeypatch.setattr(calibration, "_SECONDS", 1e-4)
    assert calibration._points(CPU, [8, 16], [missing]) == ()


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no device 'abacus'; use cpu or cuda"):
        calibrate("abacus")
    with pytest.raises(ValueError, match="this machine has no meta"):
        calibrate("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="this machine has no cuda:1; use cpu, or run it on the machine"):
            calibrate("cuda:1")
