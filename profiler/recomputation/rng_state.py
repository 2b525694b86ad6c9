"""Randomness: the states of the generators that a single op may draw from, and drawing from them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def drawing_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The states of the generators that an op may draw from; on the CPU outside of torch's allocator."""
    device = _device(args, kwargs)
    if device.type != "cuda":
        return torch.get_rng_state().numpy().copy(), None
    return device, torch.cuda.get_rng_state(device)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))


@contextmanager
def drawing_as(state: Any) -> Iterator[None]:
    """Inside, random numbers come as they came in forward; on leaving, the generators are as before."""
    if state is None:
        yield
        return
    first, cuda = state
    if cuda is None:
        now = torch.get_rng_state()
        torch.set_rng_state(torch.from_numpy(first))
    else:
        now = torch.cuda.get_rng_state(first)
        torch.cuda.set_rng_state(cuda, first)
    try:
        yield
    finally:
        if cuda is None:
            torch.set_rng_state(now)
        else:
            torch.cuda.set_rng_state(now, first)
