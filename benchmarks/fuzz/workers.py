"""Runs cases in worker processes, so that a segmentation fault ends one case and not the fuzz."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.fuzz.cases import Case
from benchmarks.fuzz.shrinking import shrunk
from benchmarks.fuzz.verdicts import Outcome, judged, quiet_process

CASE_SECONDS = 60.0  # a case takes about half a second; the first one of a model has its profile as well
SHRINK_SECONDS = 300.0
CASES_OF_A_PROCESS = 400
# A server that has loaded torch and run nothing forks workers at once.
_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOAD = ["benchmarks.fuzz.verdicts", "torch._dynamo", "planner.runtime.applier"]
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class _Worker:
    """A process that judges cases in turn, and tells which one it is at."""

    def __init__(self, cases: Sequence[Case], prepare: str) -> None:
        self.waiting: deque[Case] = deque(cases)
        self.at: Case | None = None
        self.ended = False
        self.since = time.monotonic()
        here, there = _CONTEXT.Pipe(duplex=False)
        self.pipe: Connection = here
        self.process: BaseProcess = _CONTEXT.Process(target=_work, args=(there, list(cases), prepare), daemon=True)
        self.process.start()
        there.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection, cases: list[Case], prepare: str) -> None:
    _begin(prepare)
    for outcome in judged(cases, begin=pipe.send):
        pipe.send(outcome)
    pipe.send(None)


def _begin(prepare: str) -> None:
    quiet_process()
    if prepare:
        module, _, name = prepare.partition(":")
        getattr(importlib.import_module(module), name)()


def run(
    groups: Iterable[Sequence[Case]], *, jobs: int = 1, prepare: str = "", case_seconds: float = CASE_SECONDS
) -> Iterator[Outcome]:
    """Outcomes of all cases, in the order in which they come.

    Args:
        groups: cases of one model each, which run in one process.
        jobs: processes at a time.
        prepare: ``module:function``, called in each process before its first case.
        case_seconds: after that a case counts as crashed.
    """
    _CONTEXT.set_forkserver_preload(_PRELOAD)
    waiting = deque(_loads(groups))
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_Worker(waiting.popleft(), prepare))
            ready = wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                message = _message(worker, worker.pipe in ready, case_seconds)
                if isinstance(message, Outcome):
                    yield message
                if worker.ended:
                    worker.end()
                    workers.remove(worker)
                    if worker.waiting:
                        waiting.appendleft(list(worker.waiting))
    finally:
        for worker in workers:
            worker.end()


def _message(worker: _Worker, ready: bool, case_seconds: float) -> Any:
    """What a worker says; the outcome of the case at which it has ended, or hangs."""
    if ready:
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            return _lost(worker, f"the process ended with {worker.process.exitcode} (-11: segmentation fault)")
        worker.since = time.monotonic()
        if isinstance(message, Case):
            worker.at = worker.waiting.popleft()
        elif message is None:
            worker.ended = True
        else:
            worker.at = None
        return message
    if time.monotonic() - worker.since > case_seconds:
        worker.process.kill()
        worker.process.join()
        return _lost(worker, f"it did not end in {case_seconds:.0f} s")
    return None


def _lost(worker: _Worker, detail: str) -> Outcome | None:
    """The outcome of the case under way; without one the process never began, and the next case stands for it."""
    case = worker.at or (worker.waiting.popleft() if worker.waiting else None)
    worker.at, worker.ended = None, True
    return None if case is None else Outcome(case=case, verdict="crash", detail=detail)


def _loads(groups: Iterable[Sequence[Case]]) -> Iterator[list[Case]]:
    """Groups put together for one process."""
    load: list[Case] = []
    for group in groups:
        load += group
        if len(load) >= CASES_OF_A_PROCESS:
            yield load
            load = []
    if load:
        yield load


def smallest(failure: Outcome, prepare: str = "") -> Outcome:
    """The smallest case that fails as this one does, looked for in a process of its own.

    Where that ends, as it does with a segmentation fault, every case is tried in its own.
    """
    here, there = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_shrink, args=(there, failure, prepare), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(SHRINK_SECONDS) else failure
    except EOFError:
        return shrunk(failure, lambda case: alone(case, prepare))
    finally:
        process.kill()
        process.join()
        here.close()


def _shrink(pipe: Connection, failure: Outcome, prepare: str) -> None:
    _begin(prepare)
    pipe.send(shrunk(failure, lambda case: next(judged([case]))))


def alone(case: Case, prepare: str = "") -> Outcome:
    """The outcome of one case in a process of its own."""
    (outcome,) = run([[case]], prepare=prepare)
    return outcome
