"""The states of the random generators that an op may draw from, and drawing from them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def random_state_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device, Any]:
    """The device that an op may draw on, and its generator's state; the CPU's as numpy's, outside torch's allocator."""
    device = _device(args, kwargs)
    state = _state_on(device)
    return device, state if device.type == "cuda" else state.numpy().copy()


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


def _state_on(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def drawing_from(recorded: tuple[torch.device, Any] | None) -> Iterator[None]:
    """Inside, random numbers come as they did when the state was recorded; on leaving, the generator is as before.

    Args:
        recorded: of ``random_state_of``; None for what draws none.
    """
    if recorded is None:
        yield
        return
    device, state = recorded
    now = _state_on(device)
    _set_state(device, state if isinstance(state, Tensor) else torch.from_numpy(state))
    try:
        yield
    finally:
        _set_state(device, now)
