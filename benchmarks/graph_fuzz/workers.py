"""Judges seeds in worker processes, so that the end of a process is the outcome of one program."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.fuzz.verdicts import quiet_process
from benchmarks.graph_fuzz.verdicts import Outcome, judged

PROGRAM_SECONDS = 300.0  # a program takes 5 to 20, most of them in torch.compile
SEEDS_OF_A_PROCESS = 25
_CONTEXT = multiprocessing.get_context("forkserver")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def run(seeds: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """Outcomes of all seeds, in the order in which they come.

    Args:
        seeds: of the programs.
        jobs: processes at a time.
    """
    waiting = deque(tuple(seeds[k : k + SEEDS_OF_A_PROCESS]) for k in range(0, len(seeds), SEEDS_OF_A_PROCESS))
    workers: dict[Connection, tuple[Any, deque[int]]] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                here, process, left = _started(waiting.popleft())
                workers[here] = process, left
            for pipe in wait([*workers], timeout=PROGRAM_SECONDS) or [next(iter(workers))]:
                assert isinstance(pipe, Connection)
                process, left = workers[pipe]
                outcome = _received(pipe, process, left[0])
                left.popleft()
                yield outcome
                if left and outcome.verdict != "crash":
                    continue
                del workers[pipe]
                process.kill()
                if left:
                    waiting.appendleft(tuple(left))
    finally:
        for process, _ in workers.values():
            process.kill()


def _started(seeds: tuple[int, ...]) -> tuple[Connection, Any, deque[int]]:
    here, there = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_work, args=(there, seeds), daemon=True)
    process.start()
    there.close()
    return here, process, deque(seeds)


def _work(pipe: Connection, seeds: tuple[int, ...]) -> None:
    quiet_process()
    for seed in seeds:
        pipe.send(judged(seed))


def _received(pipe: Connection, process: Any, seed: int) -> Outcome:
    """What a worker says; a crash where it has ended, or says nothing."""
    if not pipe.poll():
        return Outcome(seed=seed, verdict="crash", detail=f"it did not end in {PROGRAM_SECONDS:.0f} s")
    try:
        return pipe.recv()
    except (EOFError, OSError):
        process.join()
        return Outcome(seed=seed, verdict="crash", detail=f"the process ended with {process.exitcode}")
