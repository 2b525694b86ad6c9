"""Profiles: exact bytes against torch's own tracker, stages found, and a model left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

import planner
from planner.zoo import build
from profiler.records import Profile
from profiler.workload.workload import Workload
from tests.support.nightly import by_day
from tests.support.odd_models import MODELS, workload
from tests.support.small_blocks import WIDTH, Residual, Stack


def everything_of(work: Workload) -> list[Any]:
    optimizer = work.optimizer.state_dict() if work.optimizer is not None else {}
    flags = [module.training for module in work.model.modules()]
    gradients = [None if p.grad is None else p.grad.clone() for p in work.model.parameters()]
    state = copy.deepcopy([work.model.state_dict(), optimizer])
    return [state, flags, gradients, torch.get_rng_state(), [p._version for p in work.model.parameters()]]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


BY_DAY = ["batchnorm", "growing_list", "meddles"]


@pytest.mark.slow
@pytest.mark.parametrize("name", by_day(MODELS, BY_DAY))
def test_profiling_and_measuring_leave_the_model_as_it_was(name: str) -> None:
    work = workload(name)
    work.step()  # So that there are gradients and optimizer states to disturb.
    before = everything_of(work)
    planner.profile(work)
    planner.measure(work, repeats=1)
    after = everything_of(work)
    assert same(before[:4], after[:4])
    assert all("forward" not in module.__dict__ for module in work.model.modules())


class Stumbles(nn.Module):
    """Runs a few times, then fails."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.blocks = Stack([Residual(dropout=0.1) for _ in range(3)])
        self.left = after

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        y = self.blocks(x)
        if self.left < 0:
            raise RuntimeError("stumbled")
        return y


@pytest.mark.slow
@pytest.mark.parametrize("after", range(7))
def test_a_failing_forward_leaves_the_model_as_it_was(after: int) -> None:
    torch.manual_seed(0)
    model = Stumbles(after)
    optimizer = torch.optim.AdamW(model.parameters())
    work = Workload(model=model, inputs=torch.randn(4, WIDTH), loss=torch.sum, optimizer=optimizer)
    before = everything_of(work)
    with pytest.raises((planner.errors.ProfileError, RuntimeError), match="stumbled"):
        planner.profile(work)
    assert same(before[:4], everything_of(work)[:4])
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("name", by_day(["plain", "dropout", "skip"], ["skip"]))
def test_the_peak_is_that_of_torchs_own_tracker(name: str) -> None:
    work = workload(name)
    work.step()
    work.zero_grad()
    tracker = MemTracker()
    assert work.optimizer is not None and isinstance(work.inputs, Tensor)
    tracker.track_external(work.model, work.optimizer, work.inputs)
    with tracker:
        work.step()
    expected = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert planner.measure(work, repeats=1).peak_bytes == expected
    assert planner.profile(work, menus=False).unplanned_peak_bytes == expected


def test_bytes_of_a_linear_chain_by_hand() -> None:
    # Two linear layers of 16 to 16 with a tanh each on 64 rows: each tanh keeps its output of 64 * 16 * 4 = 4096
    # bytes, which the next linear layer keeps too (once); each layer has (16 * 16 + 16) * 4 = 1088 bytes of parameters.
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    work = Workload(model=model, inputs=torch.randn(64, 16), loss=torch.sum)
    profile = planner.profile(work)
    stages = {stage.name: stage for stage in profile.stages if stage.kind == "stage"}
    assert list(stages) == ["0", "1", "2", "3"]
    assert [stages[n].boundary_bytes for n in ("0", "1", "2")] == [4096, 4096, 4096]
    assert [stages[n].kept_bytes for n in stages] == [0, 4096, 0, 4096]
    assert [stages[n].kept_output_bytes for n in stages] == [0, 4096, 0, 0]
    assert [stages[n].parameter_gradient_bytes for n in stages] == [1088, 0, 1088, 0]
    assert profile.resident.parameters == 2 * 1088 and profile.resident.inputs == 4096


def names_of(work: Workload, **settings: Any) -> list[str]:
    return [stage.name for stage in planner.profile(work, menus=False, **settings).stages if stage.kind == "stage"]


@pytest.mark.slow
def test_stages_are_the_blocks_of_the_zoo_models() -> None:
    small = {"layers": 4, "hidden": 32, "heads": 2, "batch": 2}
    assert {f"transformer.h.{i}" for i in range(4)} <= set(names_of(build("gpt2", seq=16, **small)))
    assert {f"bert.encoder.layer.{i}" for i in range(4)} <= set(names_of(build("bert", seq=16, **small)))
    assert {f"model.layers.{i}" for i in range(4)} <= set(names_of(build("llama", seq=16, **small)))
    assert {f"vit.layers.{i}" for i in range(4)} <= set(names_of(build("vit", image=32, patch=8, **small)))
    assert {"down1", "down4", "mid", "up4", "up1"} <= set(names_of(build("unet", hidden=4, image=32, batch=2)))
    found = names_of(build("resnet50", hidden=8, image=32, batch=4))
    assert {"resnet.encoder.stages.0.layers.0", "resnet.encoder.stages.3.layers.2"} <= set(found)


@pytest.mark.slow
def test_the_user_names_stages() -> None:
    assert names_of(workload("plain"), stages=["blocks.1", "blocks.3"]) == ["blocks.1", "blocks.3"]
    assert names_of(workload("plain"), stages=["blocks.*"]) == [f"blocks.{i}" for i in range(6)]
    assert names_of(workload("plain"), stages=[Residual]) == [f"blocks.{i}" for i in range(6)]
    assert names_of(workload("plain"), stages=["Residual"]) == [f"blocks.{i}" for i in range(6)]


def test_a_pattern_that_matches_nothing_lists_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"expected a module name.*blocs\.1.*nearest: blocks\.1"):
        planner.profile(workload("plain"), stages=["blocs.1"])


@pytest.mark.slow
def test_calls_of_one_module_are_told_apart() -> None:
    assert names_of(workload("shared"), stages=["shared"]) == ["shared", "shared#1", "shared#2"]


@pytest.mark.slow
def test_what_cannot_be_run_twice_is_not_recomputable() -> None:
    reasons = {s.name: s.reason for s in planner.profile(workload("cache"), stages=["blocks.*"], menus=False).stages}
    assert all("puts tensors into a Cache" in reasons[f"blocks.{i}"] for i in range(3))
    eats = {s.name: s for s in planner.profile(workload("eats_input"), stages=["blocks.*"], menus=False).stages}
    assert "in place" in eats["blocks.0"].reason
    assert "in place" in eats["blocks.2"].reason
    assert eats["blocks.1"].recomputable and eats["blocks.3"].recomputable
    stores = {s.name: s for s in planner.profile(workload("remembers"), stages=["blocks.*"], menus=False).stages}
    assert "stores tensors" in stores["blocks.0"].reason
    meddles = {s.name: s for s in planner.profile(workload("meddles"), stages=["blocks.*"], menus=False).stages}
    assert "buffer of another module" in meddles["blocks.0"].reason
    after = {s.name: s for s in planner.profile(workload("changed_after"), stages=["blocks.*"], menus=False).stages}
    assert all(after[f"blocks.{i}"].recomputable for i in range(4))


@pytest.mark.slow
def test_random_draws_and_buffers_are_seen() -> None:
    dropout = planner.profile(workload("dropout"), stages=["blocks.*"], menus=False)
    assert all(s.draws_random for s in dropout.stages if s.kind == "stage")
    norm = planner.profile(workload("batchnorm"), stages=["blocks.*"], menus=False)
    stage = next(s for s in norm.stages if s.kind == "stage")
    assert stage.mutated_buffers == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert not stage.draws_random


def test_every_op_is_recorded_with_its_module() -> None:
    profile = planner.profile(workload("plain"))
    ops = profile.ops
    assert list(ops.columns) == ["side", "place", "module", "op", "seconds", "output_bytes", "kept"]
    linear = ops[(ops.module == "blocks.0.inner.1") & (ops.op == "aten.addmm.default")]
    assert linear.output_bytes.tolist() == [64 * 4 * WIDTH * 4] and linear.kept.tolist() == [True]
    views = ops[ops.op == "aten.t.default"]
    assert len(views) > 0 and (views.output_bytes == 0).all()
    backward = ops[(ops.side == "backward") & (ops.module == "blocks.0.inner.1")]
    assert (backward.op == "aten.mm.default").sum() == 2 and (backward.place == "blocks.0").all()


@pytest.mark.slow
def test_a_profile_survives_its_file(tmp_path: Any) -> None:
    profile = planner.profile(workload("skip"))
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


@pytest.fixture(scope="module")
def blocks_of_plain() -> Profile:
    return planner.profile(workload("plain"), stages=["blocks.*"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], "breaks off"),
        (lambda text: text.replace('"version": 3', '"version": 99'), "version 3, got 99"),
        (lambda text: text.replace("planner-profile", "planner-plan"), "got 'planner-plan'"),
        (lambda text: text.replace('"unplanned_seconds": ', '"unplanned_seconds": NaN, "x": '), "finite"),
        (lambda text: text.replace('"unplanned_peak_bytes": ', '"unplanned_peak_bytes": -'), "unplanned_peak_bytes"),
        (lambda text: text.replace('"resident"', '"resident_"'), "fields of a profile"),
        (lambda text: text.replace('"blocks.1"', '"blocks.one"', 1), "fingerprint"),
    ],
)
def test_a_spoilt_profile_file_is_refused(tmp_path: Any, blocks_of_plain: Profile, spoil: Any, message: str) -> None:
    path = tmp_path / "profile.json"
    blocks_of_plain.save(path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(ValueError, match=message):
        Profile.load(path)


@pytest.mark.slow
def test_files_are_written_whole_or_not_at_all(tmp_path: Any) -> None:
    profile = planner.profile(workload("plain"), menus=False)
    with pytest.raises(ValueError, match="folder"):
        profile.save(tmp_path / "missing" / "profile.json")
    assert list(tmp_path.iterdir()) == []


def test_bad_workloads_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="torch.nn.Module"):
        Workload(model=3, inputs=torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="wrap it in a tuple"):
        Workload(model=model, inputs=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="autocast"):
        Workload(model=model, inputs=torch.ones(1, 2), autocast="int8")
    with pytest.raises(planner.errors.ProfileError, match="scalar loss"):
        planner.profile(Workload(model=model, inputs=torch.ones(1, 2)))
    with pytest.raises(planner.errors.ProfileError, match="call model.train"):
        planner.profile(Workload(model=nn.Linear(2, 2).eval(), inputs=torch.ones(1, 2), loss=torch.sum))


def test_a_model_without_stages_can_still_be_profiled() -> None:
    work = Workload(model=nn.Linear(4, 4), inputs=torch.randn(3, 4), loss=torch.sum)
    profile = planner.profile(work)
    plan = planner.solve(profile, profile.unplanned_peak_bytes)
    assert [s.kind for s in profile.stages] == ["outside"] and plan.recomputed_ops == 0
    with pytest.raises(planner.Infeasible):
        planner.solve(profile, profile.unplanned_peak_bytes - 1)


@pytest.mark.slow
def test_existing_gradients_are_resident() -> None:
    work = workload("plain")
    work.accumulate = True
    profile = planner.profile(work, menus=False)
    trainable = sum(p.numel() * 4 for p in work.model.parameters())
    assert profile.resident.gradients == trainable
    assert all(p.grad is None for p in work.model.parameters())
    assert planner.measure(work, repeats=1).peak_bytes == profile.unplanned_peak_bytes


def test_a_step_that_takes_the_next_batch_of_an_iterator_finds_all_of_them_afterwards() -> None:
    model, batches = nn.Linear(4, 4), iter([torch.full((2, 4), float(k)) for k in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        batch = next(batches)
        seen.append(batch[0, 0].item())
        model(batch).sum().backward()
        optimizer.step()

    planner.profile(planner.Workload(model=model, step=step), menus=False)
    assert seen == []
    for _ in range(3):
        step()
    assert seen == [0.0, 1.0, 2.0]


def test_a_loss_that_nothing_trained_goes_into_says_so() -> None:
    workload = planner.Workload(model=nn.Linear(4, 4).requires_grad_(False), inputs=torch.ones(2, 4), loss=torch.sum)
    with pytest.raises(ValueError, match="got one that nothing trained goes into; unfreeze"):
        planner.profile(workload)
