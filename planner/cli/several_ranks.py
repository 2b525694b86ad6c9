"""Commands that torchrun starts on several ranks: their process group, who prints, and what each of them builds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    from planner.cli.output import Output
    from planner.distributed.sharding import Engine
    from profiler.workload.workload import Workload

ENGINES = ("ddp", "fsdp2")  # as planner.distributed.sharding has them, which loads torch
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LETTING_GO_SECONDS = 0.1


def engine_named(shard: str | None) -> Engine | None:
    """The engine that ``--shard`` names; None without.

    Raises:
        ValueError: no such engine, or torchrun has not started this process.
    """
    if shard is None:
        return None
    if shard not in ENGINES:
        raise ValueError(f"--shard: expected {' or '.join(ENGINES)}, got {shard!r}; use one of them")
    if not is_launched():
        raise ValueError(
            "--shard: this process was not started by torchrun, which sets "
            f"{', '.join(_ENVIRONMENT)}; run torchrun --nproc-per-node N -m planner with the same arguments"
        )
    return shard  # type: ignore[return-value]


def is_launched() -> bool:
    """Whether torchrun, or what sets the same variables, has started this process."""
    return all(name in os.environ for name in _ENVIRONMENT)


@contextlib.contextmanager
def on_ranks(engine: Engine | None, out: Output) -> Iterator[None]:
    """Inside, this process is one of torchrun's ranks, and the first one prints; nothing without an engine."""
    if engine is None:
        yield
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group()
    out.rank = dist.get_rank()
    yield
    # After an error other ranks may not come here any more. Gloo's threads may still be letting go of what the last
    # backward gave them; if Python ends meanwhile, the process aborts (torch 2.13), so they get time without its lock.
    dist.barrier()
    time.sleep(_LETTING_GO_SECONDS)
    dist.destroy_process_group()


def check_joined(out: Output) -> None:
    """Without ``--shard``: refuse ranks that the target has not brought together itself; the first one prints.

    Raises:
        ValueError: there are several, and each would train by itself.
    """
    processes = _processes()
    if processes < 2:
        return
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError(
            f"torchrun started {processes} processes, but torch.distributed is not initialized; add --shard ddp or "
            "fsdp2, or name a target that calls init_process_group and wraps its model"
        )
    out.rank = dist.get_rank()


def check_alone() -> None:
    """Refuse several processes without ``--shard``; raises ValueError."""
    if _processes() > 1:
        raise ValueError(f"torchrun started {_processes()} processes, which nothing connects; add --shard ddp or fsdp2")


def _processes() -> int:
    """How many torchrun has started."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def workload_of(target: TargetRecord, out: Output, engine: Engine | None = None) -> Workload:
    """The workload that a target builds on this rank.

    Raises:
        TargetError: as ``planner.targets.build_recorded``.
        ValueError: as ``check_joined``, without an engine.
    """
    from planner.targets import build_recorded, parse_settings

    workload = build_recorded(target, settings_of_rank(target.text, parse_settings(target.settings), engine))
    if engine is None:
        check_joined(out)
    return workload


def settings_of_rank(target: str, settings: Mapping[str, Any], engine: Engine | None) -> dict[str, Any]:
    """The target's arguments on this rank: batches of the zoo are drawn from another seed on each.

    A target of one's own reads ``RANK`` from the environment, or asks ``torch.distributed``.
    """
    if engine is None or not target.startswith("zoo:"):
        return dict(settings)
    seed = settings.get("seed", 0)
    return {**settings, "seed": seed + int(os.environ["RANK"])} if isinstance(seed, int) else dict(settings)
