"""Saved sets: which storages a stage keeps from forward to backward, for the fewest seconds of ops that run again.

Formulation: for every storage s a binary ``keep[s]``, for every op o a binary ``rerun[o]``. A storage has versions (an
in-place op makes the next one); what is kept is the last. A version is available if it is the kept one or the op that
makes it runs again. Every version that backward needs is available, and so is every one that an op which runs again
reads, the one that it overwrites included. An op that must not run again has ``rerun`` = 0. The bytes kept stay below a
limit; minimised are the seconds of what runs again. Ops after the last needed one are not run again, because nothing
asks for them.

Guarantee: exact, up to HiGHS's relative gap of 1e-6; where the sizes have no large common divisor, a limit may be
exceeded by a hundred-thousandth of all bytes per storage. Complexity: a 0/1 program with one variable per op and
storage and one row per read; milliseconds for a transformer block. Units: bytes and seconds.

Source: the min-cut of Zheng et al. ("AOTAutograd", PyTorch) and Checkmate (Jain et al. 2020) with one stage, with
the knapsack limit in place of the cut; both know tensors only, not storages and in-place ops.

>>> storages = (HeldTensor(size_bytes=4, saved=True), HeldTensor(size_bytes=2, saved=True))
>>> ops = (RerunCandidate(seconds=1.0, allocates=(0,)), RerunCandidate(seconds=5.0, reads=((0, 0),), allocates=(1,)))
>>> cheapest(SavedSetProblem(steps=ops, storages=storages), limit_bytes=3)
SavedSet(kept=(1,), rerun=(0,), kept_bytes=2, seconds=1.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from solvers.highs import Program

StorageVersion = tuple[int, int]
SECONDS = 2.0  # per limit; blocks need milliseconds, whole models of a thousand ops about one
_SCALE = 1e4  # what all ops cost together in the program: far above HiGHS's absolute tolerances
# All storages in units of the program's limit: HiGHS's tolerance of 1e-6 for each variable stays below a unit.
_MOST_UNITS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A storage that ops make or read.

    Attributes:
        size_bytes: what keeping it costs; 0 for what is there anyway.
        saved: backward needs its last version.
        outside: no op of the stage makes it.
    """

    size_bytes: int
    saved: bool = False
    outside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunCandidate:
    """One op, in order.

    Attributes:
        seconds: of one more run.
        reads: pairs (storage, version) that it reads.
        allocates: storages that it makes.
        writes: storages that it changes in place; it reads the version before.
        must_run_once: it must not run again.
    """

    seconds: float
    reads: tuple[StorageVersion, ...] = ()
    allocates: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    must_run_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSetProblem:
    """The choice for one stage: its ops in order and its storages."""

    steps: tuple[RerunCandidate, ...]
    storages: tuple[HeldTensor, ...]


@dataclass(frozen=True, slots=True)
class SavedSet:
    """An answer: storages kept, ops that run again, the bytes and the seconds of that."""

    kept: tuple[int, ...]
    rerun: tuple[int, ...]
    kept_bytes: int
    seconds: float


def frontier(problem: SavedSetProblem, count: int) -> list[SavedSet]:
    """Saved sets between the most and the fewest bytes, at ``count`` limits spread evenly, fewest seconds first.

    Equal answers are given once.
    """
    most_bytes = sum(storage.size_bytes for storage in problem.storages if storage.saved)
    smallest = cheapest(problem, fewest_bytes(problem))
    if smallest is None:
        return []
    step_bytes = (most_bytes - smallest.kept_bytes) / max(1, count)
    limits = [most_bytes - round(step_bytes * number) for number in range(1, count)]
    answers = [cheapest(problem, limit) for limit in limits]
    by_kept = {answer.kept: answer for answer in [*answers, smallest] if answer is not None}
    return sorted(by_kept.values(), key=lambda answer: (answer.seconds, -answer.kept_bytes))


def cheapest(problem: SavedSetProblem, limit_bytes: int) -> SavedSet | None:
    """The saved set of at most ``limit_bytes`` that costs the least seconds; None where there is none."""
    return _solved(problem, limit_bytes, 1.0, 1e-9)


def fewest_bytes(problem: SavedSetProblem) -> int:
    """The least bytes with which backward is possible."""
    answer = _solved(problem, None, 0.0, 1.0)
    assert answer is not None  # To keep everything is always possible.
    return answer.kept_bytes


def _solved(problem: SavedSetProblem, limit_bytes: int | None, per_second: float, per_byte: float) -> SavedSet | None:
    program = Program()
    all_seconds = sum(step.seconds for step in problem.steps) or 1.0
    all_bytes = sum(storage.size_bytes for storage in problem.storages) or 1
    keep = [program.variable(cost=_SCALE * per_byte * s.size_bytes / all_bytes) for s in problem.storages]
    rerun = [program.variable(cost=_SCALE * per_second * step.seconds / all_seconds) for step in problem.steps]
    _add_rows(program, problem, keep, rerun)
    if limit_bytes is not None:
        unit = _unit_bytes(problem)
        terms = [(keep[n], float(s.size_bytes // unit)) for n, s in enumerate(problem.storages) if s.size_bytes >= unit]
        program.row(terms, upper=float(limit_bytes // unit))
    answer = program.solve(time_limit_seconds=SECONDS)
    if answer.values is None:
        return None
    kept = tuple(n for n, x in enumerate(keep) if answer.values[x] > 0.5)
    rerun_ops = tuple(o for o, x in enumerate(rerun) if answer.values[x] > 0.5)
    kept_bytes = sum(problem.storages[n].size_bytes for n in kept)
    return SavedSet(kept, rerun_ops, kept_bytes, sum(problem.steps[o].seconds for o in rerun_ops))


def _unit_bytes(problem: SavedSetProblem) -> int:
    """What sizes are counted in; divides all of them unless that makes too many units."""
    sizes = [storage.size_bytes for storage in problem.storages]
    common = math.gcd(*sizes) or 1
    return common * max(1, -(-sum(sizes) // (common * _MOST_UNITS)))


def _add_rows(program: Program, problem: SavedSetProblem, keep: Sequence[int], rerun: Sequence[int]) -> None:
    makers, overwritten, last = _versions(problem)

    def available(value: StorageVersion) -> list[tuple[int, float]]:
        kept = [(keep[value[0]], 1.0)] if value[1] == last[value[0]] else []
        return kept + ([(rerun[makers[value]], 1.0)] if value in makers else [])

    for number, storage in enumerate(problem.storages):
        if storage.saved:
            program.row(available((number, last[number])), lower=1.0)
        if storage.outside and not storage.size_bytes:
            program.fix(keep[number], 1.0)
    for ordinal, step in enumerate(problem.steps):
        if step.must_run_once:
            program.fix(rerun[ordinal], 0.0)
            continue
        for value in (*step.reads, *overwritten[ordinal]):
            terms = [term for term in available(value) if term[0] != rerun[ordinal]]
            program.row([*terms, (rerun[ordinal], -1.0)], lower=0.0)


def _versions(
    problem: SavedSetProblem,
) -> tuple[dict[StorageVersion, int], list[list[StorageVersion]], list[int]]:
    """The op that makes each version, the versions that each op overwrites, and the last version of every storage."""
    makers: dict[StorageVersion, int] = {}
    overwritten: list[list[StorageVersion]] = []
    version = [0] * len(problem.storages)
    for ordinal, step in enumerate(problem.steps):
        overwritten.append([(number, version[number]) for number in step.writes])
        for number in step.allocates:
            makers[number, 0] = ordinal
        for number in step.writes:
            version[number] += 1
            makers[number, version[number]] = ordinal
    return makers, overwritten, version
