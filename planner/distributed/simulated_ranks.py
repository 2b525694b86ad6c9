"""Ranks that do not exist: one process plays the first of them, by torch's own fake process group.

Its collectives send nothing. What gloo allocates beside them on the CPU is allocated here as well, and each result is
what ranks with the same batch would get; NCCL's memory lies outside of the allocator that is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
from torch.nn.parallel import DistributedDataParallel

from profiler.current_device import active_device

FEWEST_RANKS = 2


def check_simulated(world_size: int) -> None:
    """Refuse what cannot be simulated here; raises ValueError."""
    if world_size < FEWEST_RANKS:
        raise ValueError(
            f"--world-size: expected at least {FEWEST_RANKS} ranks, got {world_size}; leave it out for one process"
        )
    if not dist.is_available():
        raise ValueError("--world-size: expected torch with torch.distributed, got one built without; install another")
    if dist.is_initialized():
        raise ValueError(
            f"--world-size: expected a process alone, got one of a group of {dist.get_world_size()}; run it without "
            "torchrun, or measure on the real ranks: planner.profile"
        )


@contextlib.contextmanager
def simulated_group(world_size: int) -> Iterator[None]:
    """Inside, the default process group has so many ranks, and this process is the first.

    Args:
        world_size: at least 2.

    Raises:
        ValueError: as ``check_simulated``.
    """
    check_simulated(world_size)
    from torch.testing._internal.distributed.fake_pg import FakeStore  # Registers the backend.

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Traffic:
    """The bytes that one rank sends, counted as its collectives run: in rings, as gloo and NCCL do with large tensors.

    Attributes:
        sent_bytes: of parameters that are gathered, and of gradients that are summed.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0

    def gathered(self, whole_bytes: int, ranks: int) -> None:
        """Everyone has everything."""
        self.sent_bytes += whole_bytes * (ranks - 1) // ranks
        if (device := active_device()) is not None:
            device.communicate(whole_bytes, ranks, awaited=True)

    def reduced(self, whole_bytes: int, ranks: int) -> None:
        """Everyone has the sum of a part."""
        self.sent_bytes += whole_bytes * (ranks - 1) // ranks
        if (device := active_device()) is not None:
            device.communicate(whole_bytes, ranks, awaited=False)


def simulate_collectives(model: nn.Module) -> Traffic:
    """Have a model that ``shard`` has wrapped gather its parameters and sum its gradients with simulated ranks.

    Args:
        model: wrapped inside ``simulated_group``.
    """
    traffic = Traffic()
    if isinstance(model, DistributedDataParallel):
        # The wrapper would look at annotations of a function: these are texts.
        model.register_comm_hook(None, lambda _, bucket: _summed(bucket, traffic))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_AllGather(traffic))
            module.set_custom_reduce_scatter(_ReduceScatter(traffic))
    return traffic


def _summed(bucket: dist.GradBucket, traffic: Traffic) -> torch.futures.Future[Tensor]:
    """A bucket of gradients whose mean over ranks is there: the fake group's own future has no result."""
    mean, ranks = bucket.buffer(), dist.get_world_size()
    traffic.reduced(mean.nbytes, ranks)
    traffic.reduced(mean.nbytes, ranks)  # What is gathered again, which nothing waits for before backward ends.
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(mean)
    return future


def _is_gloo(tensor: Tensor) -> bool:
    """Whether ranks with such tensors would communicate through gloo, which allocates buffers of its own."""
    device = active_device()
    return tensor.device.type == "cpu" if device is None else device.record.kind == "cpu"


class _Buffers(Comm):
    """Made as for FSDP2's own collectives."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Buffers, AllGather):
    """All parts are those of this rank; gloo gathers them in a buffer of its own before it copies them out."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self.traffic.gathered(output_tensor.nbytes, group.size())
        beside = torch.empty_like(output_tensor) if _is_gloo(output_tensor) else None
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # Its own part is where the input lies.
                part.copy_(input_tensor)
        del beside


class _ReduceScatter(_Buffers, ReduceScatter):
    """The mean is this rank's part; gloo sums in a copy of the input, and divides there."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.traffic.reduced(input_tensor.nbytes, group.size())
        summed = input_tensor
        if _is_gloo(input_tensor):
            summed = input_tensor.clone()
            if op == dist.ReduceOp.AVG:
                summed /= 1  # Dividing makes a number or two.
        output_tensor.copy_(summed.view(group.size(), -1)[group.rank()])
