"""Models wrapped for several ranks as it is done by hand: in DistributedDataParallel, or fully_shard block by block."""

from __future__ import annotations

from typing import Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from planner.distributed.alike_steps import check_alike
from planner.distributed.ranks import current_ranks
from profiler.workload.data_parallel import states_in
from profiler.workload.optimizers import with_inner
from profiler.workload.workload import Workload, varied

Engine = Literal["ddp", "fsdp2"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def shard(model: nn.Module, engine: Engine) -> nn.Module:
    """Wrap a model for all ranks of the default process group.

    Args:
        model: on its device. ``fully_shard`` works in place and makes its parameters anew: an optimizer comes after,
            or goes through ``sharded``.
        engine: ``"ddp"``: in a DistributedDataParallel with its default arguments; ``"fsdp2"``: ``fully_shard`` of each
            of ``repeated_blocks``, then of the model.

    Returns:
        The model to call: a wrapper for ``"ddp"``, the same object for ``"fsdp2"``.

    Raises:
        ValueError: no such engine, or the model is wrapped already.
    """
    check_engine(engine)
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if wrapped or states_in(model):
        kind = "DistributedDataParallel" if wrapped else "fully_shard"
        raise ValueError(f"shard: expected a model without wrappers, got one in {kind}; leave one of the two out")
    if engine == "ddp":
        return DistributedDataParallel(model)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def check_engine(engine: str) -> None:
    """Refuse a name that is none; raises ValueError."""
    if engine not in ENGINES:
        raise ValueError(f"shard: expected {' or '.join(ENGINES)}, got {engine!r}; use one of them")


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats, in the order of its modules; none lies inside another.

    These are the children of a ModuleList, ModuleDict or Sequential where those that have parameters are several, all
    of one class. A block that shares a parameter with what is outside of it is none: the two are gathered together.

    >>> mlp = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    >>> repeated_blocks(mlp)
    [Linear(in_features=2, out_features=2, bias=True), Linear(in_features=2, out_features=2, bias=True)]
    """
    places: dict[int, set[int]] = {}  # of each parameter, the modules that it is registered in
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), set()).add(id(module))
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, _CONTAINERS):
            continue
        with_parameters = [child for child in module.children() if next(child.parameters(), None) is not None]
        if len(with_parameters) < 2 or len(set(map(type, with_parameters))) > 1:
            continue
        if isinstance(with_parameters[0], _CONTAINERS) and not _is_called(with_parameters[0]):
            continue
        blocks += [child for child in with_parameters if _is_alone(child, places)]
        inside.update(each for child in with_parameters for each in child.modules())
    return blocks


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, at which its parameters would be gathered."""
    return isinstance(module, nn.Sequential) or type(module).forward is not nn.Module.forward


def _is_alone(block: nn.Module, places: dict[int, set[int]]) -> bool:
    """Whether all parameters of a block are registered in its own modules only."""
    own = {id(module) for module in block.modules()}
    return all(places[id(parameter)] <= own for parameter in block.parameters())


def sharded(workload: Workload, engine: Engine) -> Workload:
    """A workload whose model is wrapped by ``shard``, and whose optimizers hold the parameters that it has then.

    Args:
        workload: its batch stays as it is: that of one rank. Not to be used any more.
        engine: as for ``shard``.

    Raises:
        ValueError: as ``shard``, an optimizer has states already, or a custom step calls a model that
            would have to be another object.
    """
    if any(optimizer.state for optimizer in with_inner(workload.optimizers)):
        raise ValueError("shard: expected an optimizer without states, got a used one; shard before the first step")
    if workload.custom_step is not None and engine == "ddp":
        raise ValueError(
            "shard: expected a workload of a model and a batch, got a step of your own, which calls the model without "
            "its wrapper; wrap the model in DistributedDataParallel yourself, or shard with fsdp2"
        )
    before = {id(parameter): name for name, parameter in workload.model.named_parameters()}
    model = shard(workload.model, engine)
    if engine == "ddp":
        return varied(workload, model=model)
    after = dict(model.named_parameters())
    for optimizer in with_inner(workload.optimizers):
        for group in optimizer.param_groups:  # The list stays the same object: some optimizers hold it themselves.
            group["params"][:] = [after[before[id(p)]] if id(p) in before else p for p in group["params"]]
    return varied(workload, model=model)


def sharded_together(workload: Workload, engine: Engine) -> Workload:
    """The workload wrapped as ``sharded`` does it, on every rank of the default process group.

    Args:
        workload: this rank's, with a batch of its own and a model that may have been drawn from any seed: parameters
            and buffers become the first rank's. Not to be used any more.
        engine: ``"ddp"`` or ``"fsdp2"``.

    Raises:
        RankError: ranks have different models or shapes of batches, or it failed on one of them.
        ValueError: as ``sharded``.
    """
    ranks = current_ranks()
    if ranks is None:
        return sharded(workload, engine)
    with ranks.together("shard"):
        check_alike(ranks, "shard", workload)
        if engine == "fsdp2":  # DistributedDataParallel does so by itself.
            for tensor in (*workload.model.parameters(), *workload.model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        return sharded(workload, engine)
