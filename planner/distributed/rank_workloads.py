"""A workload that ranks build alike, wrapped for all of them: the same model, with the first rank's values."""

from __future__ import annotations

import torch.distributed as dist

from planner.distributed.alike_steps import check_alike
from planner.distributed.ranks import current_ranks
from planner.distributed.sharding import Engine, sharded
from profiler.workload.workload import Workload


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
