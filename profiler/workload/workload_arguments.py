"""The arguments of a workload, checked as they are given; what is wrong raises ValueError."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from profiler.workload.optimizers import optimizer_names, wants_closure

_AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "float16": torch.float16, "fp16": torch.float16}


class StepError(ValueError):
    """A step that is none, or that nothing is known for; the message says what to do."""


def check_kinds(model: Any, inputs: Any, loss: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"Workload: expected model to be a torch.nn.Module, got {type(model).__name__}; pass one")
    # A pipeline's part, a scripted module and the like have their forward elsewhere.
    if inspect.getattr_static(type(model), "forward") is nn.Module.forward and "forward" not in vars(model):
        parts = ", ".join(repr(name) for name, _ in model.named_children()) or "none"
        raise ValueError(
            f"Workload: a {type(model).__name__} has no forward that a step could call, so there is nothing to plan in "
            f"it; its modules are {parts}. Plan each that is large by itself, one after the other: profile and apply "
            "the first one with step=, the whole step of your loop, then the next one with the same step and budget"
        )
    if inputs is None:
        raise ValueError("Workload: expected inputs, one batch as the model takes it, got none; pass inputs=batch")
    if not isinstance(inputs, (Tensor, tuple, list, Mapping)):
        raise ValueError(
            "Workload: expected inputs to be a tensor, a tuple of arguments or a dict of keyword arguments, "
            f"got {type(inputs).__name__}; {_remedy(inputs)}"
        )
    if loss is None:
        return
    if not callable(loss):
        raise ValueError(f"Workload: expected loss to be callable or None, got {type(loss).__name__}; pass one")
    if others := _more_arguments(loss):
        raise ValueError(
            f"Workload: expected a loss of the model's output alone, got one that takes {' and '.join(others)}, too; "
            "bind the rest: loss=lambda output: loss(output, target)"
        )


def _more_arguments(loss: Any) -> list[str]:
    """The names of all arguments where a call with one of them is none; empty where that is not known."""
    called = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(called)
        signature.bind(None)
    except ValueError:
        return []
    except TypeError:
        return list(signature.parameters)
    return []


def _remedy(inputs: Any) -> str:
    return "pass one batch of it" if isinstance(inputs, Iterable) else "wrap it in a tuple"


def check_own(step: Any, *others: Any) -> None:
    if not callable(step):
        raise ValueError(f"Workload: expected step to be a function of no arguments, got {type(step).__name__}")
    names = ("loss", "autocast", "accumulate", "scaler", "clip_norm")
    given = [name for name, value in zip(names, others, strict=True) if value not in (None, False)]
    if given:
        raise ValueError(
            f"Workload: expected no {', '.join(given)} beside step, got some; let the step function do that itself"
        )


def check_update(optimizers: Sequence[torch.optim.Optimizer], scaler: Any, clip_norm: Any) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(
            f"Workload: expected scaler to be a torch.amp.GradScaler or None, got {type(scaler).__name__}; pass one"
        )
    number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool) and clip_norm > 0
    if clip_norm is not None and not number:
        raise ValueError(f"Workload: expected clip_norm to be a number above zero or None, got {clip_norm!r}; pass one")
    if scaler is not None and (closed := [each for each in optimizers if wants_closure(each)]):
        raise ValueError(
            "Workload: expected an optimizer whose step takes no closure beside a scaler, got "
            f"{optimizer_names(closed)}"
            ", which torch.amp.GradScaler does not step; leave the scaler out"
        )
    if not optimizers and not (scaler is None and clip_norm is None):
        raise ValueError("Workload: expected an optimizer beside scaler and clip_norm, got none; pass optimizer=")


def autocast_dtype(autocast: torch.dtype | str | None) -> torch.dtype | None:
    if autocast is None or autocast in (torch.bfloat16, torch.float16):
        return autocast  # type: ignore[return-value]
    if isinstance(autocast, str) and autocast in _AUTOCAST_DTYPES:
        return _AUTOCAST_DTYPES[autocast]
    raise ValueError(f"Workload: expected autocast to be None, bfloat16 or float16, got {autocast!r}; use one of them")
