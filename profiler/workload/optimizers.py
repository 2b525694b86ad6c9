"""The optimizers of a step: one or several, and those that evaluate the loss themselves, as LBFGS does."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from profiler.workload.reachable import reached_from
from profiler.workload.tensor_parts import storage_key
from profiler.workload.tensor_trees import tensors_in

# Whether the numbers of steps that optimizers keep as tensors lie in host memory, as they do where others are on CUDA.
COUNTS_ON_HOST: ContextVar[bool] = ContextVar("COUNTS_ON_HOST", default=False)
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def with_inner(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Optimizers, and those that they hold under any name (Lookahead, SAM, differential privacy, ZeRO), each once.

    One that only stands around another, without groups of its own, is left out.
    """
    found: dict[int, torch.optim.Optimizer] = {}
    pending = list(optimizers)
    while pending:
        if id(outer := pending.pop(0)) not in found:
            found[id(outer)] = outer
            held = reached_from(tuple(_attributes_of(outer).values()))
            pending += [each for each in held if isinstance(each, torch.optim.Optimizer)]
    return [each for each in found.values() if hasattr(each, "param_groups")]


def _attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the attributes of an optimizer beside states and groups; none of its hooks, which are of any purpose."""
    beside = ("state", "param_groups", "defaults")
    return {k: v for k, v in vars(optimizer).items() if k not in beside and not k.startswith("_optimizer_")}


def _stepping(optimizer: Any) -> Any:
    """The optimizer that steps: what accelerate's ``prepare`` returns has no step of its own."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def given_optimizers(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """One, several in a list or tuple, or none, as a tuple; each without what accelerate puts around it.

    Raises:
        ValueError: something else, an empty list, or the same one twice.
    """
    if optimizer is None:
        return ()
    several = tuple(map(_stepping, optimizer if isinstance(optimizer, (tuple, list)) else (optimizer,)))
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


def optimizers_of(step: Any, given: Any) -> Any:
    """Returns the optimizers of a custom step: the given ones, else those that it refers to; the outermost, each once.

    Where an optimizer is given that another one holds, which the step refers to, it is that one.
    """
    found = [_stepping(each) for each in reached_from(step) if isinstance(each, torch.optim.Optimizer)]
    if given is not None:
        named = given_optimizers(given)
        inside = {id(each) for each in named}
        found = [*named, *(each for each in found if inside & {id(held) for held in with_inner([each])})]
    held = {id(inner) for outer in found for inner in with_inner([outer]) if inner is not outer}
    return list({id(each): each for each in found if id(each) not in held}.values()) or None


def optimizer_names(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Their classes, ``none`` where there are none."""
    return " and ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"


def stepped_parameters(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Returns the parameters of the optimizers, group by group, each once."""
    groups = [group for each in with_inner(optimizers) for group in each.param_groups]
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[tuple[Any, str, Tensor]]:
    """Every tensor that optimizers keep, with whose it is (a parameter, mostly) and its name there."""
    tensors: list[tuple[Any, str, Tensor]] = []
    every = with_inner(optimizers)
    for owner, state in (item for each in {id(o.state): o.state for o in every}.values() for item in each.items()):
        named = state.items() if isinstance(state, Mapping) else [(owner if isinstance(owner, str) else "", state)]
        tensors += [(owner, str(name), tensor) for name, value in named for tensor in tensors_in(value)]
    held = [(name, value) for each in every for name, value in _attributes_of(each).items()]
    beside = [(name, t) for name, value in held for t in reached_from((value,)) if isinstance(t, Tensor)]
    if beside:
        parameters = {storage_key(parameter) for parameter in stepped_parameters(every)}
        tensors += [(None, name, t) for name, t in beside if storage_key(t) not in parameters]
    return tensors


def wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step has to be given a closure, which evaluates the loss and its gradients."""
    return any(map(_takes_closure, with_inner([optimizer])))


def _takes_closure(optimizer: torch.optim.Optimizer) -> bool:
    first = next(iter(inspect.signature(optimizer.step).parameters.values()), None)
    positional = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return first is not None and positional and first.default is first.empty


def fill_history(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Bring the states to the size that they have after many steps.

    LBFGS keeps a pair of vectors for every iteration, up to a number of them. Those that are missing are put in as
    zeros, which change no direction: each enters by its product with a gradient.
    """
    for optimizer in with_inner(optimizers):
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
    """Returns the tensors that a scaler holds from step to step: none before it was used."""
    return [] if scaler is None else [value for value in vars(scaler).values() if isinstance(value, Tensor)]
