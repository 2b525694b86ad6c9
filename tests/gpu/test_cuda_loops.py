"""Steps of the user's own on a CUDA device, metered by the allocator's counters alone."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from benchmarks.outside_meter import OutsideCudaMeter

pytestmark = pytest.mark.gpu

PRECISIONS = {"float32": None, "fp16": torch.float16}


class Recurrent(nn.Module):
    """Layers of a recurrent kind, each with its rest added; cuDNN runs them, and draws their dropout."""

    def __init__(self, kind: type[nn.RNNBase], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            kind(128, 128, num_layers=2, dropout=dropout, batch_first=True)  # pyright: ignore[reportCallIssue]
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def convolutions() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def dropouts() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.3)) for _ in range(6)])


SEQUENCES = (32, 32, 128)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gru": (lambda: Recurrent(nn.GRU), SEQUENCES),
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCES),
    "attention": (attention, SEQUENCES),
    "dropouts": (dropouts, SEQUENCES),
    "convolutions": (convolutions, (16, 16, 64, 64)),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def training(name: str, precision: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """A model, its optimizer, and the step that a user would write."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, batch, dtype = build().cuda(), torch.randn(shape, device="cuda"), PRECISIONS[precision]
    if len(shape) == 4:
        batch = batch.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return model, optimizer, step


def trained(name: str, precision: str, plan: planner.Plan | None) -> tuple[list[float], int]:
    """Losses of four steps, and the peak of the last three."""
    gc.collect()
    with OutsideCudaMeter("cuda") as meter:
        model, optimizer, step = training(name, precision)
        if plan is not None:
            planner.apply(model, plan)
        torch.manual_seed(3)
        losses = [step().item()]
        meter.begin()
        losses += [step().item() for _ in range(3)]
        del model, optimizer, step
    return losses, meter.peak_bytes


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_an_own_step_keeps_its_budget_and_its_losses(name: str, precision: str) -> None:
    model, optimizer, step = training(name, precision)
    profile = planner.profile(planner.Workload(model=model, step=step, optimizer=optimizer))
    del model, optimizer, step
    expected, unplanned_bytes = trained(name, precision, None)
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1)
    smallest_bytes = refused.value.minimum_budget_bytes
    assert smallest_bytes < profile.unplanned_peak_bytes
    for budget_bytes in (smallest_bytes, (smallest_bytes + profile.unplanned_peak_bytes) // 2):
        plan = planner.solve(profile, budget_bytes)
        losses, peak_bytes = trained(name, precision, plan)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert peak_bytes <= budget_bytes < unplanned_bytes
        assert abs(plan.predicted_peak_bytes - peak_bytes) <= 0.02 * peak_bytes


def test_dropout_that_cudnn_draws_by_itself_is_right_or_said(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Its state is made once in a process, and changes with every call."""
    monkeypatch.setitem(MODELS, "dropped gru", (lambda: Recurrent(nn.GRU, dropout=0.1), SEQUENCES))
    model, optimizer, step = training("dropped gru", "float32")
    profile = planner.profile(planner.Workload(model=model, step=step, optimizer=optimizer))
    expected, _ = trained("dropped gru", "float32", None)
    plan = planner.solve(profile, "100%")
    losses, peak_bytes = trained("dropped gru", "float32", plan)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert peak_bytes <= plan.budget_bytes or any("peak is not promised" in str(each.message) for each in recwarn)


def test_a_step_that_the_device_has_no_room_for_is_profiled_and_trains(whole_device: None) -> None:
    model, optimizer, step = training("attention", "float32")
    work = planner.Workload(model=model, step=step, optimizer=optimizer)
    unplanned_bytes = planner.measure(work, repeats=1).peak_bytes
    limit_bytes = int(0.7 * unplanned_bytes)
    profile = planner.profile(work, limit=limit_bytes)
    plan = planner.solve(profile, limit_bytes)
    with planner.apply(model, plan):
        assert planner.measure(work, repeats=1).peak_bytes <= limit_bytes


def test_transformers_trainer_trains_within_its_budget(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from planner.integrations.transformers import MemoryBudgetCallback

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokens = torch.randint(2, 100, (64, 64), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    def logged(budget: str | None, *, bf16: bool) -> list[dict[str, Any]]:
        transformers.set_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, use_cache=False, **sizes))
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
        settings = transformers.TrainingArguments(str(tmp_path), max_steps=8, bf16=bf16, **quiet)
        trainer = transformers.Trainer(model=model, args=settings, train_dataset=rows)
        if budget is not None:
            trainer.add_callback(MemoryBudgetCallback(trainer, budget=budget))
        trainer.train()
        return trainer.state.log_history

    for bf16 in (False, True):
        expected = [entry["loss"] for entry in logged(None, bf16=bf16) if "loss" in entry]
        log = logged("70%", bf16=bf16)
        assert [entry["loss"] for entry in log if "loss" in entry] == pytest.approx(expected, rel=1e-5)
        (planned,) = [entry for entry in log if "budget_bytes" in entry]
        (measured,) = [entry for entry in log if "measured_peak_bytes" in entry]  # Only CUDA's counters are free.
        assert measured["measured_peak_bytes"] <= planned["budget_bytes"]


def test_the_whole_way_at_the_command_line(tmp_path: Path) -> None:
    sizes = ["layers=4", "hidden=128", "seq=128", "batch=8"]
    page = tmp_path / "page.html"
    options = ["--device", "cuda", "--set", *sizes, "--budget", "60%", "--json", "-o", str(page)]
    command = [sys.executable, "-m", "planner", "train", "zoo:gpt2", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["measured_peak_bytes"] <= said["budget_bytes"] < said["unplanned_peak_bytes"]
    assert page.is_file()
