"""The parts that every built-in model shares: seeded building, checked settings, the device and the optimizer."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from profiler.workload.tensor_trees import map_tensors
from profiler.workload.workload import Workload

LEARNING_RATE = 1e-3
MOMENTUM = 0.9
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer] | None] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=MOMENTUM),
    "adafactor": torch.optim.Adafactor,
    "none": None,
}
_AUTOCAST = {"float32": None, "amp-bf16": torch.bfloat16, "amp-fp16": torch.float16, "bf16": None}
PRECISIONS = tuple(_AUTOCAST)
COMMON = {"seed": 0, "device": "cpu", "optimizer": "adamw", "precision": "float32"}  # of every model, beside its sizes
_CHOICES = {"optimizer": tuple(OPTIMIZERS), "precision": PRECISIONS}

_LEAST = {"seed": 0, "seq": 2}  # with one token there is no next one to predict, and the loss is NaN; others: 1


class Unknown(ValueError):
    """A model or a setting that the zoo does not have, whatever its value, or a device that is not there."""


class ZooModel(NamedTuple):
    """A model and its batch, as drawn on the CPU; ``loss`` takes the output, and the ``target`` where there is one."""

    model: nn.Module
    inputs: Tensor | dict[str, Tensor]
    loss: Callable[..., Tensor] | None = None
    target: Tensor | None = None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw weights and batch from ``seed`` on the CPU, so they are the same on every device; the caller's RNG stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def in_training(built: ZooModel, *, device: str, optimizer: str, precision: str) -> Workload:
    """The workload of a model in training mode on ``device``.

    Args:
        optimizer: one of ``OPTIMIZERS``, over all parameters, as torch has it but for the learning rate.
        precision: ``float32``; ``amp-bf16`` and ``amp-fp16`` are float32 weights under autocast, the latter with a
            scaler; ``bf16`` has weights, gradients and floating-point inputs in bfloat16.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def moved(tensor: Tensor) -> Tensor:  # without its graph: an input that takes a gradient stays a leaf
        there = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
        return there.requires_grad_(tensor.requires_grad)

    model, make_optimizer, loss = built.model.train().to(device, dtype), OPTIMIZERS[optimizer], built.loss
    if loss is not None and built.target is not None:
        loss = functools.partial(loss, target=built.target.to(device))
    return Workload(
        model=model,
        inputs=map_tensors(moved, built.inputs),
        loss=loss,
        optimizer=make_optimizer(model.parameters(), lr=LEARNING_RATE) if make_optimizer else None,
        autocast=_AUTOCAST[precision],
        scaler=torch.amp.GradScaler(torch.device(device).type) if precision == "amp-fp16" else None,
    )


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
            "zoo: this model needs the package transformers, which is not installed; run pip install transformers",
            name="transformers",
        ) from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion in place of an unknown name."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else "use one of them"


def checked_settings(name: str, builder: Callable[..., ZooModel], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a model, defaults included: names, types, and values that can work.

    Raises:
        ValueError: with what was expected, what came, and the accepted settings.
    """
    sizes = {parameter.name: parameter.default for parameter in inspect.signature(builder).parameters.values()}
    defaults = {**sizes, **COMMON}
    accepted = ", ".join(f"{key}={value}" for key, value in defaults.items())
    for key, value in settings.items():
        if key not in defaults:
            raise Unknown(
                f"zoo:{name}: expected the settings {accepted} (defaults), got {key!r}; {did_you_mean(key, defaults)}"
            )
        _check_value(f"zoo:{name}", key, value, defaults[key])
    merged = {**defaults, **settings}
    if merged["optimizer"] == "none" and merged["precision"] == "amp-fp16":
        raise ValueError(
            f"zoo:{name}: precision=amp-fp16 needs an optimizer (its gradients are scaled), and there is none; "
            "write optimizer=sgd or precision=amp-bf16"
        )
    if "heads" in merged and merged["hidden"] % merged["heads"]:
        raise ValueError(
            f"zoo:{name}: expected hidden to be a multiple of heads, got hidden={merged['hidden']} and "
            f"heads={merged['heads']}; change one of them"
        )
    return merged


def _check_value(where: str, key: str, value: Any, default: Any) -> None:
    least = _LEAST.get(key, 1)
    if key == "device":
        check_available(where, value)
    elif key in _CHOICES:
        if value not in _CHOICES[key]:
            raise ValueError(f"{where}: expected {key} to be {', '.join(_CHOICES[key])}, got {value!r}; use one")
    elif type(value) is not type(default):  # a bool is an int to isinstance, but not a size
        kind = type(default).__name__
        raise ValueError(f"{where}: expected {key} to be {kind}, got {value!r}; write for example {key}={default}")
    elif value < least:
        raise ValueError(f"{where}: expected {key} to be at least {least}, got {value}; write {key}={default}")


def check_available(where: str, value: Any) -> None:
    """Refuse a device that is not there, before anything is built for it; raises Unknown."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise Unknown(f"{where}: expected device to be cpu or cuda, got {value!r}; write device=cpu") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Unknown(f"{where}: the device {value!r} is not there without CUDA; write device=cpu")
