"""The optimizers of a step: one or several, and those that evaluate the loss themselves, as LBFGS does."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.tensors.tensor_trees import tensors_in

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that steps, where another one stands around it (accelerate's, which ``prepare`` returns)."""
    inner = getattr(optimizer, "optimizer", None)
    return inner_optimizer(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def given_optimizers(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """One, several in a list or tuple, or none, as a tuple; each without what stands around it.

    Raises:
        ValueError: something else, an empty list, or the same one twice.
    """
    if optimizer is None:
        return ()
    several = tuple(map(inner_optimizer, optimizer if isinstance(optimizer, (tuple, list)) else (optimizer,)))
    wrong = next((each for each in several if not isinstance(each, torch.optim.Optimizer)), None)
    if wrong is not None:
        raise ValueError(
            "Workload: expected a torch.optim.Optimizer, a list of them or None, "
            f"got {type(wrong).__name__}; pass an instance"
        )
    if not several or len({id(each) for each in several}) < len(several):
        got = "an empty list" if not several else "the same one twice"
        raise ValueError(f"Workload: expected optimizers that differ, or None, got {got}; pass each once")
    return several


def optimizers_in(reached: Iterable[Any]) -> list[torch.optim.Optimizer] | None:
    """Those among what a step refers to, each once, without what stands around them; None where there are none."""
    found = [inner_optimizer(each) for each in reached if isinstance(each, torch.optim.Optimizer)]
    return list({id(each): each for each in found}.values()) or None


def optimizer_names(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Their classes, ``none`` where there are none."""
    return " and ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"


def stepped_parameters(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """What they step, group by group."""
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[tuple[Any, str, Tensor]]:
    """Every tensor that optimizers keep, with whose it is (a parameter, mostly) and its name there."""
    tensors: list[tuple[Any, str, Tensor]] = []
    for owner, state in (item for each in optimizers for item in each.state.items()):
        named = state.items() if isinstance(state, Mapping) else [(owner if isinstance(owner, str) else "", state)]
        tensors += [(owner, str(name), tensor) for name, value in named for tensor in tensors_in(value)]
    return tensors


def wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step has to be given a closure, which evaluates the loss and its gradients."""
    first = next(iter(inspect.signature(optimizer.step).parameters.values()), None)
    positional = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return first is not None and positional and first.default is first.empty


def fill_history(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Bring the states to the size that they have after many steps.

    LBFGS keeps a pair of vectors for every iteration, up to a number of them. Those that are missing are put in as
    zeros, which change no direction: each enters by its product with a gradient.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.LBFGS):
            continue
        most = optimizer.param_groups[0]["history_size"]
        for state in optimizer.state.values():
            directions, steps, factors = (state.get(name) for name in ("old_dirs", "old_stps", "ro"))
            while directions and len(directions) < most:
                directions.insert(0, torch.zeros_like(directions[0]))
                steps.insert(0, torch.zeros_like(steps[0]))
                factors.insert(0, torch.zeros_like(factors[0]))
            if directions and state.get("al"):
                state["al"][:] = [torch.zeros_like(factors[0]) if value is None else value for value in state["al"]]


def scaler_tensors(scaler: torch.amp.GradScaler | None) -> list[Tensor]:
    """What a scaler holds from step to step: nothing before it was used."""
    return [] if scaler is None else [value for value in vars(scaler).values() if isinstance(value, Tensor)]
