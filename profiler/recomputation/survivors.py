"""Survivors: tensors that a call made and that outlive it somewhere other than in its output."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.workload.tensor_trees import tensors_in


class Survivors(TorchDispatchMode):
    """Watches every storage that ops inside return; ask ``any_left`` once all results have been let go."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref[Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {id(t.untyped_storage()) for t in tensors_in((args, kwargs)) if t.layout is torch.strided}
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            if tensor.layout is torch.strided and id(storage := tensor.untyped_storage()) not in known:
                self._storages.append(weakref.ref(storage))
        return output

    def any_left(self) -> bool:
        """Whether a storage made inside is still alive, cyclic garbage aside."""
        if not any(reference() is not None for reference in self._storages):
            return False
        gc.collect()
        return any(reference() is not None for reference in self._storages)
