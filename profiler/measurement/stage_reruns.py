"""Stage calls run a second time: whether that gives the same, and how long it takes up to the last saved tensor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from profiler.measurement.stage_probe import FirstRun
from profiler.recomputation.module_rerun import rerun_keeping, rerun_until_saved
from profiler.recomputation.recompute_checks import EscapedTensors
from profiler.workload.tensor_trees import in_new_containers, tensors_in


@dataclass(slots=True, kw_only=True)
class RerunTimes:
    """Seconds of a stage's second run, or why there can be none."""

    seconds: float = 0.0
    failure: str = ""


def rerun_stages(
    first_runs: Sequence[FirstRun], kinds: Sequence[int], device: torch.device, *, compiled: bool
) -> list[RerunTimes]:
    """Run one stage of each kind again; where one of a kind cannot be run twice, each of its kind is tried.

    Args:
        first_runs: the calls of the stages.
        kinds: a number for each stage; equal where structure and shapes are equal.
        device: of the model.
        compiled: whether the model is compiled, or something in it.
    """
    first_of: dict[int, RerunTimes] = {}
    reruns = []
    for first, kind in zip(first_runs, kinds, strict=True):
        if first.input_changed():
            reruns.append(RerunTimes(failure="its input is changed in place afterwards"))
        elif kind in first_of and not first_of[kind].failure:
            reruns.append(first_of[kind])
        else:
            reruns.append(_rerun(first, device, compiled=compiled))
            first_of.setdefault(kind, reruns[-1])
    return reruns


def _rerun(first: FirstRun, device: torch.device, *, compiled: bool) -> RerunTimes:
    try:
        failure = _why_not_the_same(first, device, compiled=compiled)
        return RerunTimes(seconds=min(_timed(first, device) for _ in range(2)), failure=failure)
    except Exception as error:  # noqa: BLE001 - user code runs here; whatever it raises, it cannot be run twice.
        return RerunTimes(failure=f"running it a second time fails: {error}")


def _why_not_the_same(first: FirstRun, device: torch.device, *, compiled: bool) -> str:
    """What is different in a second run, or stays of it; empty where nothing is."""
    args, kwargs = in_new_containers(first.arguments)
    with EscapedTensors() as escaped:
        saved, output = rerun_keeping(first.call, first.state, args, kwargs)
    if compiled:  # Under a dispatch mode it ran uncompiled.
        args, kwargs = in_new_containers(first.arguments)
        saved, output = rerun_keeping(first.call, first.state, args, kwargs)
    difference = _difference(first, saved, output, device)
    del saved, output, args, kwargs
    if escaped.any_left():
        return difference or "it stores tensors of its forward (in an attribute, a cache or a hook)"
    return difference


def _difference(first: FirstRun, saved: list[Tensor], output: Any, device: torch.device) -> str:
    if [(tuple(t.shape), t.dtype) for t in saved] != first.saved:
        return (
            "running it a second time saves other tensors (a cache or a counter changed; for transformers: use_cache)"
        )
    for before, after in zip(tensors_in(first.output), tensors_in(output), strict=True):
        # GPU kernels may add in another order; a wrong mask or input differs by far more than this.
        tolerance = 0.0 if device.type == "cpu" else 0.05
        if not torch.allclose(before, after, rtol=tolerance, atol=tolerance, equal_nan=True):
            return "running it a second time gives another result"
    return ""


def _timed(first: FirstRun, device: torch.device) -> float:
    args, kwargs = in_new_containers(first.arguments)
    _synchronize(device)
    begin = time.perf_counter()
    rerun_until_saved(first.call, first.state, args, kwargs, len(first.saved))
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
