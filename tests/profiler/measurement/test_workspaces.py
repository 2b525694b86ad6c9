"""Workspaces of CUDA's libraries are taken before steps are measured, in both threads that run ops."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.measurement.device_memory import products_in_both_threads, take_workspaces

CPU = torch.device("cpu")


class Products(TorchDispatchMode):
    """Notes the products that run: their type, with a bias or without, in backward or before it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[torch.dtype, str, bool]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.seen.add((args[0].dtype, name, torch._C._current_graph_task_id() != -1))
        return func(*args, **(kwargs or {}))


def test_products_of_all_types_run_before_and_in_backward() -> None:
    random_state = torch.get_rng_state()
    with Products() as products, torch.no_grad():
        products_in_both_threads(CPU)
    types = (torch.float32, torch.bfloat16, torch.float16)
    assert products.seen == {(t, name, back) for t in types for name in ("mm", "addmm") for back in (False, True)}
    assert torch.equal(torch.get_rng_state(), random_state)


def test_nothing_runs_on_the_cpu() -> None:
    with Products() as products:
        take_workspaces(CPU)
    assert not products.seen
