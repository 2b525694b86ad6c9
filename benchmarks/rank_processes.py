"""Runs a function on several gloo ranks, a process each, and always ends: what each rank returned or raised.

Tests and benchmarks of anything under torch.distributed start here:

    def losses(rank: int, steps: int) -> list[float]: ...   # at the top of a module

    first, second = values_of_ranks(losses, 3)

Each rank runs on one thread, inside an initialised default group. Its store is held by the calling process, as torchrun
holds it, so that a rank that dies takes no messages along. A launch takes some seconds: check several things in one.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Read as torch is imported, in each process.
GROUP_SECONDS = 20.0  # the group's timeout, that its collectives wait for each other
_START_SECONDS = 60.0  # On a machine that is busy, processes start at different times.


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.

    Attributes:
        value: that the function returned.
        error: the class of what it raised, and its message; empty where it raised nothing.
        traceback: of the error.
        exit_code: of the process: 0 also after an exception; -9 where it was killed; None where it did not end.
        seconds: from the start of the function to its end.
    """

    value: Any = None
    error: str = ""
    traceback: str = ""
    exit_code: int | None = None
    seconds: float = 0.0


def run_on_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int = 2,
    group_seconds: float = GROUP_SECONDS,
    limit_seconds: float = 120.0,
) -> list[RankResult]:
    """Call ``function(rank, *arguments)`` on each rank; processes that are not over by then are killed.

    Args:
        function: at the top of a module; what it returns can be pickled.
        arguments: can be pickled.
        ranks: how many.
        group_seconds: the timeout of the group.
        limit_seconds: for everything, the start of the processes included.
    """
    deadline = time.monotonic() + limit_seconds
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(
                target=_run_rank, args=(function, arguments, rank, ranks, store.port, group_seconds, folder)
            )
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            ended = [process.exitcode for process in processes]
            for process in processes:
                process.kill()
                process.join()
        return [_result(Path(folder) / str(rank), code) for rank, code in enumerate(ended)]


def values_of_ranks(function: Callable[..., Any], *arguments: Any, **settings: Any) -> list[Any]:
    """What the function returned on each rank; fails with the traceback of a rank on which it returned nothing.

    Args:
        function, arguments, settings: as for ``run_on_ranks``.
    """
    results = run_on_ranks(function, *arguments, **settings)
    for rank, result in enumerate(results):
        if result.error or result.exit_code != 0:
            raise AssertionError(f"rank {rank} ended with code {result.exit_code}:\n{result.traceback}")
    return [result.value for result in results]


def _result(file: Path, exit_code: int | None) -> RankResult:
    said = pickle.loads(file.read_bytes()) if file.exists() else {}
    return RankResult(**said, exit_code=exit_code)


def _run_rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    ranks: int,
    port: int,
    group_seconds: float,
    folder: str,
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    start = timedelta(seconds=_START_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=start)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=group_seconds), None)
    said: dict[str, Any] = {}
    began = time.monotonic()
    try:
        said["value"] = function(rank, *arguments)
    except BaseException as error:  # noqa: BLE001 - it is what the caller asks for.
        said.update(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    said["seconds"] = time.monotonic() - began
    file = Path(folder) / str(rank)
    file.with_suffix(".part").write_bytes(pickle.dumps(said))
    file.with_suffix(".part").rename(file)
    if not said.get("error"):
        dist.destroy_process_group()
    os._exit(0)  # A group that is broken may wait for the others as Python ends.
