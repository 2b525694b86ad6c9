"""Ops that draw random numbers, run again with the numbers of their first run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree


def draws(op: fx.Node) -> bool:
    """Whether an op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(op.target, "tags", ())


def has_own_generator(op: fx.Node) -> bool:
    """Whether an op is given a generator, which the code around it may make or seed anew in every call."""
    if not isinstance(op.target, torch._ops.OpOverload):
        return False
    arguments = op.target._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), op.args, strict=False)), **op.kwargs}
    return any("Generator" in str(each.type) and given.get(each.name) is not None for each in arguments)


def random_state(device: torch.device) -> Tensor:
    """The state of a device's generator: 5,056 bytes on the CPU, 16 on CUDA, both in host memory."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def device_of(op: fx.Node) -> torch.device:
    """The device of what an op makes."""
    return next(leaf.device for leaf in pytree.tree_leaves(op.meta["val"]) if isinstance(leaf, Tensor))


def state_bytes(op: fx.Node) -> int:
    """Bytes on an op's device of its generator's state."""
    device = device_of(op)
    return random_state(device).nbytes if device.type == "cpu" else 0


def run_from_state(state: Tensor, device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run an op with the numbers that came from a state; the generator is as before then."""
    before = random_state(device)
    try:
        _set_state(device, state)
        return op(*args, **kwargs)
    finally:
        _set_state(device, before)


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
