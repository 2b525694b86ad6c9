"""Caches of keys and values, and checkpointing of its own, that a model of transformers may bring along."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from profiler.caller_warnings import warn_caller
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

# What transformers and timm call the switch of their own checkpointing.
_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")
SAID: set[str] = set()


class ModelCaches:
    """The caches that a model of transformers builds by its ``config.use_cache``.

    A cache keeps every layer's keys and values in the output, and a second run of a layer would add them again.

    Args:
        model: whose modules are looked through, once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        found: list[Any] = [vars(module).get("config") for module in model.modules()]
        self._configs = list({id(config): config for config in found if hasattr(config, "use_cache")}.values())

    @contextlib.contextmanager
    def off(self, given: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Inside, training calls build none, as under transformers' own checkpointing; said once.

        Args:
            given: the keyword arguments of a call; one that brings a cache along is left as it is.
        """
        brought = given is not None and given.get("past_key_values") is not None
        configs = [] if brought else [config for config in self._configs if config.use_cache is True]
        if configs:
            _say(self._name)
        try:
            for config in configs:
                config.use_cache = False
            yield
        finally:
            for config in configs:
                config.use_cache = True


def _say(kind: str) -> None:
    if kind not in SAID:
        SAID.add(kind)
        warn_caller(
            f"planner: use_cache is off in training calls of {kind}, as under its own checkpointing: a cache would "
            "keep the keys and values of every layer. Evaluation and generate are as before; model.config.use_cache = "
            "False says the same",
            UserWarning,
        )


def check_no_checkpointing(model: nn.Module, who: str) -> None:
    """Refuse a model whose own checkpointing is on: beside a plan its blocks would run three times.

    Raises:
        ValueError: with what to switch off; ``who`` begins the message.
    """
    for name, module in model.named_modules():
        if any(vars(module).get(switch) is True for switch in _CHECKPOINTING):
            off = "gradient_checkpointing_disable()" if hasattr(model, "gradient_checkpointing_disable") else ""
            off = off or "set_grad_checkpointing(False)"
            raise ValueError(
                f"{who}: expected a model without checkpointing of its own, got it switched on"
                f"{f' in {name!r}' if name else ''}; call model.{off}: the plan chooses what runs again"
            )
