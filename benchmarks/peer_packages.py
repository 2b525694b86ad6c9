"""The peers of other packages: transformers' own checkpointing, torch_remat and ckptplan, each put on a fresh model.

torch_remat and ckptplan are no requirements of ours: ``pip install torch_remat ckptplan`` where they are to be run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.peer_methods import Peer, blocks_of
from profiler.workload.workload import Workload

CKPTPLAN_SAVINGS = (0.3, 0.6, 0.9)  # of the activations that its blocks keep
MIB = 2**20


def package_peers() -> Iterator[Peer]:
    """One of transformers, one of torch_remat, and ckptplan at some settings."""
    yield Peer(
        name="transformers",
        backend="eager",
        setting="gradient_checkpointing_enable",
        installed=_transformers,
        unfit=lambda workload: (
            ""
            if getattr(workload.model, "supports_gradient_checkpointing", False)
            else "the model is none of transformers, or does not support it"
        ),
    )
    yield Peer(
        name="torch_remat",
        backend="eager",
        setting="every block",
        installed=_torch_remat,
        unfit=functools.partial(_unless_installed, package="torch_remat"),
    )
    for saving in CKPTPLAN_SAVINGS:
        yield Peer(
            name="ckptplan",
            backend="eager",
            setting=f"saving {saving:g}",
            installed=functools.partial(_ckptplan, saving=saving),
            unfit=_unfit_for_ckptplan,
        )


def _unless_installed(workload: Workload, package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


def _unfit_for_ckptplan(workload: Workload) -> str:
    if why := _unless_installed(workload, "ckptplan"):
        return why
    if next(workload.model.parameters()).device.type != "cuda":
        return "it plans on CUDA alone"
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in workload.model.modules()):
        return "it checkpoints no block that draws random numbers"
    return ""


@contextmanager
def _transformers(workload: Workload) -> Iterator[None]:
    model: Any = workload.model
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    yield


class _RandomState:
    """What torch_remat leaves to its users: the random numbers of a second run are those of the first."""

    def snapshot(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        if state[1]:
            torch.cuda.set_rng_state_all(state[1])


@contextmanager
def _torch_remat(workload: Workload) -> Iterator[None]:
    remat = importlib.import_module("torch_remat")
    for number, block in enumerate(blocks_of(workload.model)):
        wrap = remat.checkpoint(region_name=f"block.{number}", recompute_state_hooks=(_RandomState(),))
        block.forward = wrap(block.forward)
    yield


@contextmanager
def _ckptplan(workload: Workload, *, saving: float) -> Iterator[None]:
    """Its decisions, carried out by torch's checkpointing as it does itself, inside the model as it is."""
    ckptplan = importlib.import_module("ckptplan")
    blocks = blocks_of(workload.model)
    args, kwargs = _arguments_of(blocks[0], workload)
    declared = ckptplan.declare_blocks(workload.model, [(f"block{k}", block) for k, block in enumerate(blocks)])
    profiles = ckptplan.profile_blocks(declared, args, kwargs, device=args[0].device)
    plan = ckptplan.plan_checkpoints(
        profiles, declared, target_kind="activation_saving_fraction", target_value=saving, on_infeasible="best_effort"
    )
    for block, decision in zip(blocks, plan.decisions, strict=True):
        if decision.checkpointed:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    yield


def _arguments_of(block: nn.Module, workload: Workload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model calls a block with."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    try:
        workload.step()
    finally:
        hook.remove()
    return seen[0]
