"""The states of the random generators that an op may draw from, and drawing from them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

RecordedState = tuple[torch.device, Any]  # a device, and the state of its generator


def states_on(device: torch.device) -> list[RecordedState]:
    """The states of the generators that ops on a device may draw from: its own and the CPU's."""
    devices = dict.fromkeys((torch.device("cpu"), device if device.type == "cuda" else torch.device("cpu")))
    return [(on, _state_on(on)) for on in devices]


def _state_on(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.default_generator.clone_state()  # No tensor: it is held for as long as what draws from it.


def _read(device: torch.device, state: Any) -> Tensor:
    """A state in memory that the device's allocator does not count."""
    if device.type == "cuda":
        return state
    with torch._C._DisableTorchDispatch():
        return torch.from_numpy(state.get_state().numpy().copy())


def _set_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def drawing_from_all(recorded: Sequence[RecordedState]) -> Iterator[None]:
    """Inside, random numbers come as they did when states were recorded; on leaving, the generators are as before."""
    now = [(device, _read(device, _state_on(device))) for device, _ in recorded]
    try:
        for device, state in recorded:
            _set_state(device, _read(device, state))
        yield
    finally:
        for device, state in now:
            _set_state(device, state)
