"""What a plan adds to a step: predicted against measured, before and after the plan is checked against its own run."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    PreTrainedModel,
    SwinConfig,
    SwinForImageClassification,
)

import planner
from benchmarks.interleaving import in_turns
from benchmarks.reporting import RESULTS, result_name, write_result
from planner.zoo import build
from profiler.workload.workload import Workload

SHARES = (75, 60, 45)  # of the unplanned peak
# Sizes at which a block takes 2 ms or more on a CPU.
_TEXT = {"layers": 6, "hidden": 128, "heads": 4, "seq": 128, "batch": 8, "vocab": 1000}
SETTINGS: dict[str, dict[str, int]] = {
    "gpt2": _TEXT,
    "bert": _TEXT,
    "llama": _TEXT,
    "t5": {**_TEXT, "layers": 4},
    "vit": {"layers": 6, "hidden": 128, "heads": 4, "image": 64, "patch": 8, "batch": 16},
    "resnet50": {"hidden": 16, "image": 64, "batch": 16},
    "unet": {"hidden": 16, "image": 64, "batch": 8},
}


class _Dense(nn.Module):
    """A layer that adds its channels to those before it."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(torch.relu(self.norm(x)))], dim=1)


def _densenet() -> Workload:
    growth, channels, layers = 24, 48, []
    layers.append(nn.Conv2d(3, channels, 3, padding=1))
    for block in range(3):
        for _ in range(5):
            layers.append(_Dense(channels, growth))
            channels += growth
        if block < 2:
            layers.append(nn.Sequential(nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)))
            channels //= 2
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    labels = torch.randint(0, 10, (16,))
    return Workload(
        model=model,
        inputs=torch.randn(16, 3, 32, 32),
        loss=lambda output: nn.functional.cross_entropy(output, labels),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def _classifier(model: PreTrainedModel) -> Workload:
    inputs = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 10, (8,))}
    return Workload(
        model=model,
        inputs=inputs,
        loss=lambda output: output.loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def _swin() -> Workload:
    config = SwinConfig(
        image_size=64, patch_size=2, embed_dim=48, depths=[2, 2, 4, 2], num_heads=[2, 4, 8, 16], window_size=4
    )
    config.num_labels = 10
    return _classifier(SwinForImageClassification(config).train())


def _convnext() -> Workload:
    config = ConvNextConfig(image_size=64, patch_size=2, hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2])
    config.num_labels = 10
    return _classifier(ConvNextForImageClassification(config).train())


OWN: dict[str, Callable[[], Workload]] = {"swin": _swin, "convnext": _convnext, "densenet": _densenet}


def workload_of(name: str) -> Workload:
    """A model of the zoo, or one of this module's own."""
    torch.manual_seed(0)
    return OWN[name]() if name in OWN else build(name, **SETTINGS[name])


def rows_of(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each budget; a plan that is checked against its own run is measured beside the first one."""
    workload = workload_of(name)
    workload.step()
    begin = time.perf_counter()
    profile = planner.profile(workload)
    profile_seconds = time.perf_counter() - begin
    for share in SHARES:
        try:
            plan = planner.solve(profile, f"{share}%")
        except planner.Infeasible:
            continue
        verified = planner.verify(workload, plan)
        plain, (first, second) = in_turns(workload, [plan, verified.plan], rounds)
        extra = _extra(plain, first)
        predicted, corrected = plan.slowdown - 1, verified.plan.slowdown - 1
        yield {
            "model": name,
            "budget_percent": share,
            "plain_seconds": statistics.median(plain),
            "profile_in_plain_steps": profile_seconds / statistics.median(plain),
            "recomputed_ops": plan.recomputed_ops,
            "predicted_extra": predicted,
            "measured_extra": extra,
            "predicted_over_measured": predicted / extra if extra else float("nan"),
            "plans_run": len(verified.rounds),
            "verified_predicted_extra": corrected,
            "verified_measured_extra": _extra(plain, second),
            "verified_predicted_over_measured": corrected / (_extra(plain, second) or float("nan")),
            "noise": abs(_extra(plain[::2], plain[1::2])),
        }


def _extra(plain: list[float], planned: list[float]) -> float:
    """What planned steps take more, in plain steps, each at its best: what else runs on a machine only adds."""
    return _best(planned) / _best(plain) - 1


def _best(seconds: list[float]) -> float:
    """The mean of the fastest quarter."""
    return statistics.fmean(sorted(seconds)[: max(len(seconds) // 4, 1)])


def summary(frame: pd.DataFrame) -> list[str]:
    """How far the predictions are off."""
    off = (frame["predicted_over_measured"] - 1).abs()
    near = (frame["predicted_extra"] - frame["measured_extra"]).abs()
    total = frame["predicted_extra"].sum() / frame["measured_extra"].sum()
    verified = (frame["verified_predicted_over_measured"] - 1).abs()
    faster = frame["verified_measured_extra"] - frame["measured_extra"]
    return [
        "extra: what a plan adds to a plain step, in plain steps; measured in turns, the fastest quarter of the steps",
        "noise: the same for every other plain step, against the rest of them",
        f"predicted over measured: off by {off.median():.0%} (median) and {off.max():.0%} (most), by "
        f"{near.median():.3f} of a step (median) where noise is {frame['noise'].median():.3f} (median) and "
        f"{frame['noise'].max():.3f} (most); all predicted over all measured {total:.2f}",
        f"after the plan was checked against its own run: off by {verified.median():.0%} (median) and "
        f"{verified.max():.0%} (most); the plan handed back took {faster.median():+.3f} plain steps more (median)",
    ]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*SETTINGS, *OWN])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of torch: with one, others on the machine disturb less")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    frame = pd.DataFrame([row for name in options.models for row in rows_of(name, options.rounds)])
    title = "What plans add to a step: predicted against measured"
    write_result(options.out, result_name("extra-seconds", "cpu"), title, frame, summary(frame))


if __name__ == "__main__":
    main()
