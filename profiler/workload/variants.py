"""Variants of a workload: the same model and batch with another precision, optimizer or way to handle gradients."""

from __future__ import annotations

from typing import Any

from profiler.workload.workload import Workload

_ARGUMENTS = ("model", "inputs", "loss", "optimizer", "autocast", "accumulate", "scaler", "clip_norm")


def varied(workload: Workload, **changes: Any) -> Workload:
    """A workload with some arguments changed; model, batch and the rest are shared with the original.

    Raises:
        TypeError: an argument that Workload does not take.
        ValueError: as Workload.
    """
    return Workload(**{**{name: getattr(workload, name) for name in _ARGUMENTS}, **changes})
