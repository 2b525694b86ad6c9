"""Owns what every zoo model shares: seeded building, checked settings, the device and the optimizer."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from profiler.workload import LossFunction, Workload

OPTIMIZERS = ("adamw", "sgd", "none")
LEARNING_RATE = 1e-3

_LEAST = {"seed": 0, "seq": 2}  # with one token there is no next one to predict, and the loss is NaN; others: 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw weights and batch from ``seed`` on the CPU, so they are the same on every device; the caller's RNG stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def finish(
    model: nn.Module,
    inputs: torch.Tensor | dict[str, torch.Tensor],
    *,
    device: str,
    optimizer: str,
    loss: LossFunction | None = None,
) -> Workload:
    """The workload of a model in training mode on ``device``."""
    model.train().to(device)
    moved = inputs.to(device) if isinstance(inputs, torch.Tensor) else {k: v.to(device) for k, v in inputs.items()}
    return Workload(model=model, inputs=moved, loss=loss, optimizer=make_optimizer(optimizer, model))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    """``adamw``, ``sgd`` (no momentum, so no state) or ``none``."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return None


def transformers() -> Any:
    """The transformers package, imported only when one of its models is built.

    Raises:
        ModuleNotFoundError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":  # it is there, and something that it needs is not
            raise
        raise ModuleNotFoundError(
            "zoo: expected the package transformers, got none installed; run pip install 'sublinear-planner[zoo]'",
            name="transformers",
        ) from error


def check_settings(name: str, builder: Callable[..., Workload], settings: Mapping[str, Any]) -> None:
    """Hold ``settings`` against the builder's signature: names, types, and values that can work.

    Raises:
        ValueError: with what was expected, what came, and the accepted settings.
    """
    defaults = {p.name: p.default for p in inspect.signature(builder).parameters.values()}
    accepted = ", ".join(f"{key}={value}" for key, value in defaults.items())
    for key, value in settings.items():
        if key not in defaults:
            raise ValueError(f"zoo:{name}: expected the settings {accepted} (defaults), got {key!r}; use one of them")
        _check_value(f"zoo:{name}", key, value, defaults[key])
    merged = {**defaults, **settings}
    if "heads" in merged and merged["hidden"] % merged["heads"]:
        raise ValueError(
            f"zoo:{name}: expected hidden to be a multiple of heads, got hidden={merged['hidden']} and "
            f"heads={merged['heads']}; change one of them"
        )


def _check_value(where: str, key: str, value: Any, default: Any) -> None:
    if key == "device":
        return _check_device(where, value)
    if key == "optimizer":
        if value not in OPTIMIZERS:
            raise ValueError(f"{where}: expected optimizer to be {', '.join(OPTIMIZERS)}, got {value!r}; use one")
        return None
    if type(value) is not type(default):  # a bool is an int to isinstance, but not a size
        kind = type(default).__name__
        raise ValueError(f"{where}: expected {key} to be {kind}, got {value!r}; write for example {key}={default}")
    least = _LEAST.get(key, 1)
    if value < least:
        raise ValueError(f"{where}: expected {key} to be at least {least}, got {value}; write {key}={default}")
    return None


def _check_device(where: str, value: Any) -> None:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{where}: expected device to be cpu or cuda, got {value!r}; write device=cpu") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{where}: expected a device that is here, got {value!r} without CUDA; write device=cpu")
