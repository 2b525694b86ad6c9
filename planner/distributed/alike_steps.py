"""What ranks that measure one step together have to have in common: the model, the batch's shapes, the training."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from planner.distributed.rank_failures import RankError
from planner.distributed.ranks import Ranks
from profiler.tensors.tensor_parts import sizes_of
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.given_models import class_name
from profiler.workload.workload import Workload

_MOST_NAMED = 3


def check_alike(ranks: Ranks, what: str, workload: Workload) -> None:
    """Refuse workloads of which a step could not be the same on all ranks; values may differ.

    Args:
        ranks: all of them call this.
        what: the function that was called, which begins the message.
        workload: this rank's.

    Raises:
        RankError: says which rank's differs, and in what.
    """
    first, *others = ranks.gathered(_described(workload))
    for rank, other in enumerate(others, start=1):
        for name, expected in first.items():
            if other[name] != expected:
                raise RankError(
                    f"{what}: expected the same {name} on every rank, got {_difference(expected, other[name], rank)}; "
                    "give every rank the same model and batches of the same shapes (drop_last=True), whatever is in "
                    "them",
                    rank,
                )


def _described(workload: Workload) -> dict[str, Any]:
    return {
        "model": {"class": type(workload.model).__name__, **_parameters(workload.model)},
        "modules in training mode": {n: str(m.training) for n, m in workload.model.named_modules()},
        "shapes of the batch": {str(n): _form(t) for n, t in enumerate(tensors_in(workload.inputs))},
        "training": {
            "optimizer": ", ".join(type(each).__name__ for each in workload.optimizers),
            "autocast": str(workload.autocast),
            "accumulate": str(workload.accumulate),
            "scaler": type(workload.scaler).__name__,
            "clip_norm": str(workload.clip_norm),
            "step": str(workload.own is not None),
        },
    }


def _parameters(model: nn.Module) -> dict[str, str]:
    modules = {f"class of {name}": class_name(module) for name, module in model.named_modules() if name}
    parameters = {
        name: f"{_form(parameter)}{'' if parameter.requires_grad else ', frozen'}"
        for name, parameter in model.named_parameters()
    }
    return {**modules, **parameters}


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(sizes_of(tensor))}"


def _difference(expected: dict[str, str], got: dict[str, str], rank: int) -> str:
    """The first few entries that differ, in words."""
    names = [name for name in dict.fromkeys([*expected, *got]) if expected.get(name) != got.get(name)]
    named = [
        f"{name} {got.get(name, 'missing')} on rank {rank} and {expected.get(name, 'missing')} on rank 0"
        for name in names[:_MOST_NAMED]
    ]
    more = f" (and {len(names) - _MOST_NAMED} more)" if len(names) > _MOST_NAMED else ""
    return "; ".join(named) + more
