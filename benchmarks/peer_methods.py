"""The peers: torch's own ways to trade time for activation memory, each put on a fresh model."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from profiler.workload.snapshot import preserved
from profiler.workload.workload import Workload

aten = torch.ops.aten

# Values of torch._functorch.config.activation_memory_budget_solver that
# torch._functorch.partitioners._optimize_runtime_with_given_memory knows (torch 2.13).
SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg", "dynamic_memory_budget_dp")
AOT_EAGER = "aot_eager_decomp_partition"  # Inductor's decompositions and min-cut partitioner, without its kernels
INDUCTOR = "inductor"

# Matrix products and fused attention: what is dear to compute. Overloads, not packets: a packet matches nothing.
SAVED_OPS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One way and one setting of it; ``installed`` has it on a fresh workload's model, which is used up by it.

    ``unfit`` says why it does not work on a workload, nothing where it does.
    """

    name: str
    backend: str
    setting: str
    installed: Callable[[Workload], AbstractContextManager[None]]
    unfit: Callable[[Workload], str] = lambda workload: ""


def eager_peers() -> Iterator[Peer]:
    """Ways without a compiler."""
    yield Peer(name="plain", backend="eager", setting="", installed=lambda workload: contextlib.nullcontext())
    yield Peer(name="checkpoint", backend="eager", setting="every block", installed=_checkpointed)
    yield Peer(
        name="selective checkpoint",
        backend="eager",
        setting="matrix products and attention saved",
        installed=functools.partial(_checkpointed, context_fn=_saving_contexts),
    )


def compiled_peers(backend: str, solvers: Iterable[str], budgets: Iterable[float]) -> Iterator[Peer]:
    """The compiled step as it is, then the memory budget with every solver and budget.

    Solvers that need a package that is not installed are left out; ``missing`` names them.
    """
    yield _compiled_peer(backend, "dp", 1.0, setting="")
    absent = missing(solvers)
    for solver in solvers:
        for budget in () if solver in absent else budgets:
            yield _compiled_peer(backend, solver, budget, setting=f"{solver} {budget:g}")


def missing(solvers: Iterable[str]) -> dict[str, str]:
    """Solvers whose package is not installed, and the package."""
    needs = {"ilp": "scipy", "dynamic_memory_budget_dp": "networkx"}
    return {name: needs[name] for name in solvers if name in needs and importlib.util.find_spec(needs[name]) is None}


def _compiled_peer(backend: str, solver: str, budget: float, *, setting: str) -> Peer:
    return Peer(
        name="memory budget" if setting else "compiled",
        backend=backend,
        setting=setting,
        installed=functools.partial(_compiled, backend=backend, solver=solver, budget=budget),
    )


@contextmanager
def _compiled(workload: Workload, *, backend: str, solver: str, budget: float) -> Iterator[None]:
    torch._dynamo.reset()
    workload.model.compile(backend=backend)
    # The budget is read whenever something compiles; the cache of whole joint graphs stays out of it.
    with functorch_config.patch(
        activation_memory_budget=budget, activation_memory_budget_solver=solver, enable_autograd_cache=False
    ):
        # Twice: transformers' models settle a setting in their first step and are compiled again in the second.
        with preserved(workload):
            workload.step()
            workload.step()
        yield


@contextmanager
def _checkpointed(workload: Workload, *, context_fn: Callable[[], Any] | None = None) -> Iterator[None]:
    more = {} if context_fn is None else {"context_fn": context_fn}
    for block in blocks_of(workload.model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **more)
    yield


def _saving_contexts() -> Any:
    return create_selective_checkpoint_contexts(list(SAVED_OPS))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's blocks: what its outermost lists of modules hold, or its children that have parts of their own.

    Raises:
        ValueError: it has neither.
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    outer = [m for name, m in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
    if outer:
        return [block for each in outer for block in each]
    parts = [child for child in model.children() if any(True for _ in child.children())]
    if not parts:
        raise ValueError(f"peers: expected a model with a ModuleList, got {type(model).__name__}; take another model")
    return parts
