"""Which stages of a step are alike: what is measured of one of them holds for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from profiler.trace.partition import ChosenStage


def alike(stages: Sequence[ChosenStage]) -> list[int]:
    """A number for each stage; equal where structure, shapes and hooks are equal."""
    numbers: dict[Any, int] = {}
    kinds = []
    for stage in stages:
        call = stage.call
        key = (
            type(call.module),
            tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in call.module.named_parameters()),
            tuple((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in call.inputs),
            call.end_op - call.first_op,
            call.end_save - call.first_save,
            call.draws_random,
            _hooks_of(call.module),
        )
        kinds.append(numbers.setdefault(key, len(numbers)))
    return kinds


HOOKS_OF_CALLS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hooks_of(module: nn.Module) -> tuple[tuple[str, str, str], ...]:
    """Which hooks run with a call: on which module in it, or for the gradient of which parameter."""
    on_modules = [
        (name, kind, getattr(hook, "__qualname__", type(hook).__name__))
        for name, inner in module.named_modules()
        for kind in HOOKS_OF_CALLS
        for hook in getattr(inner, kind).values()
    ]
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    on_parameters = [(name, kind, "") for name, p in module.named_parameters() for kind in kinds if getattr(p, kind)]
    return (*on_modules, *on_parameters)
