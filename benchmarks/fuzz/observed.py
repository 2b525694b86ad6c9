"""What a training run leaves, as plain data, and its peak by the allocator's own events: the outside meter."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Watch:
    """Records a training loop step by step, and the most bytes that were alive in it.

    Attributes:
        records: what each step left, by name; bytes of tensors, and plain values.
        peak_bytes: parameters, buffers, gradients, states of the optimizer and the batch among them; 0 unmetered.
    """

    def __init__(self, *, metered: bool = True) -> None:
        self.records: dict[str, Any] = {}
        self.peak_bytes = 0
        self._step = 0
        self._resident_bytes = 0
        self._meter: Any = None
        if metered:  # From before the model is made: it knows only blocks that it saw allocated.
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._meter = torch.profiler.profile(activities=activities, profile_memory=True)
            self._meter.start()

    def begin(self, model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer) -> None:
        """The loop begins; what is alive now is resident."""
        tensors = [*model.parameters(), *model.buffers(), *(inputs.values() if isinstance(inputs, dict) else inputs)]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_sparse}
        self._resident_bytes = sum(storages.values())
        with torch.profiler.record_function("loop begins"):
            pass

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
        """A step is over: keep what it left."""
        self._step += 1
        found: dict[str, Any] = {"loss": repr(losses), "random torch": bytes_of(torch.get_rng_state())}
        found |= {"random python": hash(random.getstate()), "random numpy": hash(str(np.random.get_state()))}
        for name, p in model.named_parameters():
            found[f"gradient of {name}"] = None if p.grad is None else bytes_of(p.grad)
            found |= {f"attribute of {name}.{key}": plain(value) for key, value in vars(p).items()}
        found |= {f"state {name}": bytes_of(value) for name, value in model.state_dict(keep_vars=True).items()}
        found |= attributes_of(model)
        self.records |= {f"step {self._step}: {name}": value for name, value in found.items()}

    def end(self) -> None:
        """The loop is over, or has failed."""
        if self._meter is not None:
            self._meter.stop()
            self.peak_bytes = self._resident_bytes + most_above_begin(self._meter.profiler.kineto_results.events())


def left_by(work: Any) -> dict[str, Any]:
    """What there is to see of a workload."""
    watch = Watch(metered=False)
    watch.step(work.model, work.optimizer, [])
    return watch.records


def most_above_begin(events: Any) -> int:
    """By how much the running sum of the allocator's events on the CPU rises above what it is when the loop begins."""
    live = begin = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            live += event.nbytes()
            most = max(most, live)
        elif event.name() == "loop begins":
            begin = most = live
    return most - begin


def bytes_of(tensor: Tensor) -> Any:
    """Its values, without a tensor being allocated."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        return bytes_of(tensor._indices()), bytes_of(tensor._values())
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return str(tensor.dtype), tuple(tensor.shape), hash(tensor.numpy().tobytes())


def attributes_of(model: nn.Module) -> dict[str, Any]:
    """Plain attributes of all modules, and tensors and generators that are no parameters and no buffers."""
    torchs_own = {*vars(nn.Module()), "forward"}
    return {
        f"attribute {name}.{key}": plain(value)
        for name, part in model.named_modules()
        for key, value in vars(part).items()
        if key not in torchs_own
    }


def plain(value: Any) -> Any:
    """A value that can be compared."""
    if isinstance(value, Tensor):
        return bytes_of(value)
    if isinstance(value, torch.Generator):
        return bytes_of(value.get_state())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def differences(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Names of what is not equal, the earliest first."""
    return [
        name for name in {**expected, **got} if name not in expected or name not in got or expected[name] != got[name]
    ]
