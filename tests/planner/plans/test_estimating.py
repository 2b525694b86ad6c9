"""An estimate has the bytes of a real step; plans of it hold on the real model; what it cannot know it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

import planner
from benchmarks.estimates import A_CPU, GPU_RESULTS
from planner import zoo
from planner.capacity.rank_advice import advise_rank
from planner.distributed.sharding import Engine
from planner.errors import ProfileError
from profiler.device_record import DeviceRecord, NetworkRecord
from profiler.records import ResidentBytes
from tests.support.nightly import at_night, by_day
from tests.support.parallel_models import PipelineLoop
from tests.support.torchrun import output_of_ranks
from tests.support.wrapped_ranks import KINDS, wrapped

ROOT = Path(__file__).resolve().parents[3]
Build = Callable[[], planner.Workload]


def gpt2() -> planner.Workload:
    return zoo.build("gpt2", layers=2, batch=2, hidden=32, seq=32, vocab=100)


def _squared(output: Tensor) -> Tensor:
    return output.float().square().mean()


def _blocks(**settings: Any) -> planner.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    return planner.Workload(model, torch.randn(256, 64), loss=_squared, optimizer=optimizer, **settings)


def mlp() -> planner.Workload:
    return _blocks()


def mixed() -> planner.Workload:
    return _blocks(autocast="bfloat16")


def accumulating() -> planner.Workload:
    return _blocks(accumulate=True, clip_norm=1.0)


def regression() -> planner.Workload:
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 64), torch.randn(256, 8)
    loss = partial(functional.mse_loss, target=torch.randn(256, 64))
    return planner.Workload(model, batch, loss=loss, optimizer=torch.optim.SGD(model.parameters(), momentum=0.9))


def normalized() -> planner.Workload:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return planner.Workload(model, torch.randn(8, 3, 32, 32), loss=_squared, optimizer=optimizer)


WORKLOADS: dict[str, Build] = {each.__name__: each for each in (gpt2, mlp, mixed, accumulating, regression, normalized)}


def _least_bytes(profile: planner.Profile) -> int:
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1, offload="never")
    return refused.value.minimum_budget_bytes


def _numbers(workload: planner.Workload, steps: int = 2) -> list[Any]:
    """The losses of steps from a seed, and all parameters and buffers after them."""
    torch.manual_seed(1)
    losses: list[Any] = [workload.step() for _ in range(steps)]
    return losses + [tensor.detach().clone() for tensor in workload.model.state_dict().values()]


def _same(left: list[Any], right: list[Any]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_peak_is_the_measured_one_and_plans_hold_on_the_real_model(name: str) -> None:
    build = WORKLOADS[name]
    profile = planner.estimate(build, device=A_CPU, menus=name == "mlp")
    assert profile.estimated and profile.device == "cpu" and profile.device_name == "a CPU"
    real = build()
    measured = planner.measure(real, repeats=1)
    assert profile.unplanned_peak_bytes == pytest.approx(measured.peak_bytes, rel=1e-3)
    parameters = sum(tensor.nbytes for tensor in real.model.parameters())
    assert profile.resident.parameters == parameters
    if name == "regression":  # Its peak is one layer's: there is nothing to plan.
        return
    budget_bytes = (_least_bytes(profile) + profile.unplanned_peak_bytes) // 2
    plan = planner.solve(profile, budget_bytes, offload="never")
    with planner.apply(real.model, plan):
        planned = planner.measure(real, repeats=1)
    assert plan.predicted_peak_bytes == pytest.approx(planned.peak_bytes, rel=5e-3)
    assert planned.peak_bytes < measured.peak_bytes
    plain, applied = build(), build()
    expected = _numbers(plain)
    with planner.apply(applied.model, plan):
        assert _same(_numbers(applied), expected)


@pytest.mark.parametrize("build", by_day([mlp, gpt2], [mlp]))
@pytest.mark.slow
def test_the_stages_that_have_programs_are_those_of_a_measured_profile(build: Build) -> None:
    estimated, measured = planner.estimate(build, device=A_CPU), planner.profile(build())
    assert [menu.opaque for menu in estimated.menus] == [menu.opaque for menu in measured.menus]
    assert not any(menu.opaque for menu in measured.menus)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "normalized"])
def test_the_states_are_those_of_a_measured_profile(name: str) -> None:
    build = WORKLOADS[name]
    estimated, measured = planner.estimate(build, device=A_CPU, menus=False), planner.profile(build(), menus=False)
    assert isinstance(estimated.resident, ResidentBytes) and estimated.resident == measured.resident
    assert estimated.made_gradient_bytes == measured.made_gradient_bytes
    assert [stage.name for stage in estimated.stages] == [stage.name for stage in measured.stages]
    assert estimated.fingerprint == measured.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("used", [False, True])
def test_a_workload_that_is_there_is_estimated_as_the_function_that_builds_it_and_is_left_alone(used: bool) -> None:
    there, untouched = accumulating(), accumulating()
    for workload in (there, untouched):
        if used:
            torch.manual_seed(2)
            workload.step()
    random = torch.get_rng_state()
    profile = planner.estimate(there, device=A_CPU, menus=False)
    assert torch.equal(torch.get_rng_state(), random)
    built = planner.estimate(accumulating, device=A_CPU, menus=False)
    assert (profile.unplanned_peak_bytes, profile.resident) == (built.unplanned_peak_bytes, built.resident)
    assert _same(_numbers(there), _numbers(untouched))


@pytest.mark.nightly
def test_the_recorded_peak_of_a_card() -> None:
    """An H200's, as its allocator counted (benchmarks/results-gpu)."""
    recorded = 128_833_032
    assert str(recorded) in (GPU_RESULTS / "loops-gpt2-cuda.csv").read_text()
    profile = planner.estimate(lambda: zoo.build("gpt2"), device="h200", menus=False)
    assert abs(profile.unplanned_peak_bytes - recorded) < 1000
    assert profile.device == "cuda:0" and profile.estimate is not None and profile.estimate.margin_bytes == 0
    assert profile.allocator_bytes % 4 == 0 and profile.link is not None


SETTINGS = {"layers": 4, "hidden": 128, "batch": 64}


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "ranks"), [("ddp", 2), ("fsdp2", 2), at_night("fsdp2", 4)])
def test_a_rank_has_the_bytes_of_one_that_runs_and_waits_for_what_it_sends(engine: Engine, ranks: int) -> None:
    def estimated(bytes_per_second: float) -> planner.Profile:
        device = replace(A_CPU, network=NetworkRecord(bytes_per_second=bytes_per_second))
        build = partial(zoo.build, "mlp", **SETTINGS)
        return planner.estimate(build, device=device, ranks=ranks, shard=engine, menus=False)

    real = advise_rank("zoo:mlp", world_size=ranks, shard=engine, settings=SETTINGS, menus=False)
    fast, slow = estimated(1e9), estimated(1e6)
    assert fast.resident == slow.resident == real.profile.resident
    assert fast.unplanned_peak_bytes == slow.unplanned_peak_bytes
    assert abs(fast.unplanned_peak_bytes - real.profile.unplanned_peak_bytes) <= 64
    for ours, theirs in zip(fast.stages, real.profile.stages, strict=True):
        for phase, measured in ((ours.forward, theirs.forward), (ours.backward, theirs.backward)):
            assert abs(phase.peak_bytes - measured.peak_bytes) <= 64, ours.name
    sent_seconds = real.sent_bytes / 1e6
    assert sent_seconds <= slow.unplanned_seconds <= sent_seconds + fast.unplanned_seconds
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.slow
@pytest.mark.nightly
def test_estimates_have_the_peaks_of_ranks_that_run(ranks: int) -> None:
    """Gloo's: tensor parallel, DistributedDataParallel, fully_shard, and both of the first and last."""
    kinds = [kind for kind in KINDS if kind != "2d" or ranks == 4]
    lines = output_of_ranks("-m", "tests.support.wrapped_ranks", *kinds, ranks=ranks).splitlines()
    measured = dict(line.split() for line in lines)
    for kind in kinds:
        profile = planner.estimate(partial(wrapped, kind), device=A_CPU, ranks=ranks, menus=False)
        assert profile.unplanned_peak_bytes == int(measured[kind]), kind


@pytest.mark.slow
def test_tensor_parallel_ranks_wait_for_what_they_send() -> None:
    def estimated(bytes_per_second: float) -> planner.Profile:
        device = replace(A_CPU, network=NetworkRecord(bytes_per_second=bytes_per_second))
        return planner.estimate(partial(wrapped, "tensor"), device=device, ranks=2, menus=False)

    slow, slower = estimated(1e6), estimated(5e5)
    # Six blocks, whose output is summed in forward, and the gradient of their input in backward.
    sent_bytes = 2 * 6 * (512 * 128 * 4)
    assert slower.unplanned_seconds - slow.unplanned_seconds == pytest.approx(sent_bytes / 1e6, rel=1e-6)


def test_a_target_with_a_mesh_needs_ranks_and_pipelines_are_refused() -> None:
    with pytest.raises(ProfileError, match="add ranks=8"):
        planner.estimate(partial(wrapped, "tensor"), device=A_CPU)

    def pipeline() -> planner.Workload:
        loop = PipelineLoop(ScheduleGPipe, 4)
        return planner.Workload(model=loop.model, step=loop.step, optimizer=loop.optimizer)

    with pytest.raises(ProfileError, match="pipelines cannot be estimated as a whole"):
        planner.estimate(pipeline, device=A_CPU, ranks=2)


def test_ranks_and_how_they_share_the_model_go_together() -> None:
    with pytest.raises(ValueError, match="shard is for several ranks; add ranks=8"):
        planner.estimate(mlp, device=A_CPU, shard="ddp")
    with pytest.raises(ValueError, match="each of 2 ranks would have the whole model"):
        planner.estimate(mlp, device=A_CPU, ranks=2)
    with pytest.raises(ValueError, match="expected ddp or fsdp2, got 'zero'"):
        planner.estimate(mlp, device=A_CPU, ranks=2, shard="zero")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="there is no card 'abacus'"):
        planner.estimate(mlp, device="abacus")


LARGE = """
import resource, torch
from torch import nn
import planner

def build():
    width = 50_000
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(10)))
    optimizer = torch.optim.AdamW(model.parameters())
    return planner.Workload(model, torch.randn(64, width), loss=lambda y: y.sum(), optimizer=optimizer)

def small():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    return planner.Workload(model, torch.randn(64, 4), loss=lambda y: y.sum(), optimizer=optimizer)

planner.estimate(small, device="h100", menus=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
profile = planner.estimate(build, device="h100", menus=False)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown * 1024, profile.resident.parameters, profile.resident.optimizer, profile.unplanned_peak_bytes)
"""


@pytest.mark.slow
def test_a_model_of_a_hundred_gigabytes_takes_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown_bytes, parameters, states, peak = map(int, done.stdout.split())
    assert parameters == 10 * 4 * 50_000**2 == 100_000_000_000 and states == 2 * parameters
    assert peak > 4 * parameters, "the optimizer's own copy is beside the gradients and the states"
    assert grown_bytes < 1e9


class _Picks(nn.Module):
    def __init__(self, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.pick = nn.Linear(8, 8), pick

    def forward(self, x: Tensor) -> Tensor:
        return self.pick(self.layer(x)).sum()


@torch.library.custom_op("test_estimating::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("pick", "said"),
    [
        (lambda y: y[y > 0], "aten.nonzero.default returns depends on values"),
        (lambda y: y.masked_select(y > 0), "aten.masked_select.default returns depends on values"),
        (lambda y: y * (y > 0).nonzero().shape[0], "aten.nonzero.default returns depends on values"),
        (lambda y: y.detach().unique() * y.sum(), "unique.* returns depends on values"),
        (
            lambda y: y.split([int(y.detach().sum())] * 2)[0],
            r"split_sizes=\[1, 1\].*\.py:\d+ reads a value",
        ),
        (lambda y: _doubled(y.detach()) + y, "test_estimating.*doubled.*torch.library.register_fake"),
    ],
)
def test_ops_whose_shapes_depend_on_values_are_refused_by_name(pick: Callable[[Tensor], Tensor], said: str) -> None:
    def build() -> planner.Workload:
        return planner.Workload(_Picks(pick), torch.ones(4, 8), loss=lambda y: y)

    with pytest.raises(ProfileError, match=said):
        planner.estimate(build, device=A_CPU)
    assert _get_current_dispatch_mode() is None and not isinstance(torch.ones(1) + 1, FakeTensor)


def test_an_error_of_the_step_is_told_as_it_is() -> None:
    def build() -> planner.Workload:
        return planner.Workload(nn.Linear(8, 8), torch.ones(4, 7), loss=lambda y: y.sum())

    with pytest.raises(ProfileError, match="4.*7") as refused:
        planner.estimate(build, device=A_CPU)
    assert "depends on values" not in str(refused.value)


def test_an_estimate_for_the_cpu_at_hand_says_that_its_speed_is_assumed() -> None:
    profile = planner.estimate(mlp, device="cpu", menus=False)
    plan = planner.solve(profile, profile.unplanned_peak_bytes)
    assert "from assumed speeds; the time may be 0.3 to 3 times as long" in plan.summary()


def test_files_and_words_say_that_it_is_estimated(tmp_path: Path) -> None:
    profile = planner.estimate(mlp, device="h100", menus=False)
    plan = planner.solve(profile, profile.unplanned_peak_bytes)
    assert profile.estimate is not None and plan.estimate == profile.estimate
    known = DeviceRecord.named("h100")
    assert (profile.estimate.device, profile.estimate.memory_bytes) == (known.name, known.budget_bytes)
    assert repr(profile).startswith("<Estimated profile of Sequential on cuda:0")
    assert f"estimated for {known.name}" in repr(plan) and f"estimated for {known.name}" in plan.in_one_line()
    assert f"estimated for {known.name}, from its data sheet; the time may be 0.7 to 1.6" in plan.summary()
    profile.save(tmp_path / "profile.json")
    plan.save(tmp_path / "plan.json")
    for name in ("profile", "plan"):
        assert json.loads((tmp_path / f"{name}.json").read_text())["estimate"]["device"] == known.name
    assert planner.Profile.load(tmp_path / "profile.json") == profile
    assert planner.Plan.load(tmp_path / "plan.json").estimate == plan.estimate
    measured = planner.profile(mlp(), menus=False)
    assert not measured.estimated and "stimated" not in repr(measured) + planner.solve(measured, "100%").summary()


def test_nothing_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planner.estimate(normalized, device="h100", menus=False)
