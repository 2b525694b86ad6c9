"""Saved sets: hand-computed stages, an oracle that tries every set of storages, and laws."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from solvers.saved_tensors import (
    HeldTensor,
    RerunCandidate,
    SavedSet,
    SavedSetProblem,
    cheapest,
    fewest_bytes,
    frontier,
)

# HiGHS stops within this of the best seconds, relative to all ops' seconds.
GAP = 1e-5


def chain(*sizes: int, seconds: float = 1.0) -> SavedSetProblem:
    """Ops one after another, each reading what the one before made; everything is saved."""
    steps = tuple(
        RerunCandidate(seconds=seconds, reads=((k - 1, 0),) if k else (), allocates=(k,)) for k in range(len(sizes))
    )
    return SavedSetProblem(steps=steps, storages=tuple(HeldTensor(size_bytes=size, saved=True) for size in sizes))


def test_what_costs_least_seconds_per_byte_runs_again() -> None:
    # Storages 0 of 4 bytes made in 1 s and 1 of 2 bytes made from it in 5 s: with 3 bytes only 1 can be kept.
    storages = (HeldTensor(size_bytes=4, saved=True), HeldTensor(size_bytes=2, saved=True))
    steps = (RerunCandidate(seconds=1.0, allocates=(0,)), RerunCandidate(seconds=5.0, reads=((0, 0),), allocates=(1,)))
    problem = SavedSetProblem(steps=steps, storages=storages)
    assert cheapest(problem, 6) == SavedSet((0, 1), (), 6, 0.0)
    assert cheapest(problem, 5) == SavedSet((1,), (0,), 2, 1.0)
    assert cheapest(problem, 3) == SavedSet((1,), (0,), 2, 1.0)
    assert cheapest(problem, 1) == SavedSet((), (0, 1), 0, 6.0)


def test_an_op_runs_again_only_to_reach_another() -> None:
    # Only the last of three storages is saved: without it all three run again; with the middle one kept, only the last.
    storages = (HeldTensor(size_bytes=9), HeldTensor(size_bytes=1), HeldTensor(size_bytes=5, saved=True))
    problem = SavedSetProblem(steps=chain(9, 1, 5).steps, storages=storages)
    assert cheapest(problem, 0) == SavedSet((), (0, 1, 2), 0, 3.0)
    assert cheapest(problem, 4) == SavedSet((1,), (2,), 1, 1.0)
    assert cheapest(problem, 5) == SavedSet((2,), (), 5, 0.0)


def test_ops_behind_the_last_saved_value_do_not_run_again() -> None:
    storages = (HeldTensor(size_bytes=3, saved=True), HeldTensor(size_bytes=3))
    problem = SavedSetProblem(steps=chain(3, 3).steps, storages=storages)
    assert cheapest(problem, 0) == SavedSet((), (0,), 0, 1.0)


def test_a_storage_changed_in_place_is_made_by_all_its_ops() -> None:
    # Op 1 changes storage 0 in place; backward needs the changed one, and op 2 reads it before.
    steps = (
        RerunCandidate(seconds=1.0, allocates=(0,)),
        RerunCandidate(seconds=4.0, reads=((0, 0),), allocates=(1,)),
        RerunCandidate(seconds=2.0, reads=((0, 0),), writes=(0,)),
    )
    storages = (HeldTensor(size_bytes=8, saved=True), HeldTensor(size_bytes=2, saved=True))
    problem = SavedSetProblem(steps=steps, storages=storages)
    assert cheapest(problem, 9) == SavedSet((1,), (0, 2), 2, 3.0)
    assert cheapest(problem, 8) == SavedSet((1,), (0, 2), 2, 3.0)
    assert cheapest(problem, 1) == SavedSet((), (0, 1, 2), 0, 7.0)


def test_a_kept_storage_does_not_give_its_earlier_version() -> None:
    # Storage 0 is kept as it is in the end; what was read from it before its change needs its first op again.
    steps = (
        RerunCandidate(seconds=1.0, allocates=(0,)),
        RerunCandidate(seconds=1.0, reads=((0, 0),), allocates=(1,)),
        RerunCandidate(seconds=9.0, reads=((0, 0),), writes=(0,), must_run_once=True),
    )
    storages = (HeldTensor(size_bytes=1, saved=True), HeldTensor(size_bytes=8, saved=True))
    answer = cheapest(SavedSetProblem(steps=steps, storages=storages), 1)
    assert answer == SavedSet((0,), (0, 1), 1, 2.0)


def test_what_must_not_run_again_is_kept() -> None:
    storages = (HeldTensor(size_bytes=7, saved=True), HeldTensor(size_bytes=2, saved=True))
    steps = (
        RerunCandidate(seconds=1.0, allocates=(0,), must_run_once=True),
        RerunCandidate(seconds=1.0, reads=((0, 0),), allocates=(1,)),
    )
    problem = SavedSetProblem(steps=steps, storages=storages)
    assert fewest_bytes(problem) == 7 and cheapest(problem, 6) is None
    assert cheapest(problem, 7) == SavedSet((0,), (1,), 7, 1.0)


def test_what_comes_from_outside_must_be_kept_to_be_read_again() -> None:
    steps = (RerunCandidate(seconds=1.0, reads=((0, 0),), allocates=(1,)),)
    paid = SavedSetProblem(
        steps=steps, storages=(HeldTensor(size_bytes=3, outside=True), HeldTensor(size_bytes=4, saved=True))
    )
    assert fewest_bytes(paid) == 3 and cheapest(paid, 3) == SavedSet((0,), (0,), 3, 1.0) and cheapest(paid, 2) is None
    free = SavedSetProblem(
        steps=steps, storages=(HeldTensor(size_bytes=0, outside=True), HeldTensor(size_bytes=4, saved=True))
    )
    assert fewest_bytes(free) == 0 and cheapest(free, 0) == SavedSet((0,), (0,), 0, 1.0)


def test_nothing_saved_costs_nothing() -> None:
    assert cheapest(SavedSetProblem(steps=(), storages=()), 0) == SavedSet((), (), 0, 0.0)
    problem = SavedSetProblem(steps=chain(5, 5).steps, storages=(HeldTensor(size_bytes=5), HeldTensor(size_bytes=5)))
    assert fewest_bytes(problem) == 0 and cheapest(problem, 0) == SavedSet((), (), 0, 0.0)


# Against every set of storages -----------------------------------------------


def rerun_of(problem: SavedSetProblem, kept: set[int]) -> set[int] | None:
    """What has to run again when these storages are kept, one op behind the other; None where that cannot be."""
    version = [0] * len(problem.storages)
    makers: dict[tuple[int, int], int] = {}
    overwritten: dict[int, list[tuple[int, int]]] = {}
    for ordinal, step in enumerate(problem.steps):
        makers.update({(number, 0): ordinal for number in step.allocates})
        for number in step.writes:
            overwritten.setdefault(ordinal, []).append((number, version[number]))
            version[number] += 1
            makers[number, version[number]] = ordinal
    rerun: set[int] = set()

    def reached(value: tuple[int, int]) -> bool:
        if value[0] in kept and value[1] == version[value[0]]:
            return True
        ordinal = makers.get(value)
        if ordinal is None or problem.steps[ordinal].must_run_once:
            return False
        if ordinal in rerun:
            return True
        rerun.add(ordinal)
        return all(
            reached(version_read) for version_read in (*problem.steps[ordinal].reads, *overwritten.get(ordinal, ()))
        )

    last = [(number, version[number]) for number, storage in enumerate(problem.storages) if storage.saved]
    return rerun if all(reached(value) for value in last) else None


def every_answer(problem: SavedSetProblem) -> list[tuple[int, float]]:
    """Bytes and seconds of every set of storages with which backward is possible."""
    free = {n for n, storage in enumerate(problem.storages) if storage.outside and not storage.size_bytes}
    answers = []
    for count in range(len(problem.storages) + 1):
        for kept in itertools.combinations(range(len(problem.storages)), count):
            rerun = rerun_of(problem, {*kept, *free})
            if rerun is not None:
                size = sum(problem.storages[number].size_bytes for number in kept)
                answers.append((size, sum(problem.steps[ordinal].seconds for ordinal in rerun)))
    return answers


def random_problem(seed: int, unit_bytes: int) -> SavedSetProblem:
    """A few ops with changes in place, ops that must not run again, and storages from outside."""
    draw = random.Random(seed)
    storages: list[HeldTensor] = []
    version: list[int] = []
    steps: list[RerunCandidate] = []
    for _ in range(draw.randint(0, 2)):
        size = draw.choice([0, draw.randint(1, 9) * unit_bytes])
        storages.append(HeldTensor(size_bytes=size, saved=draw.random() < 0.3, outside=True))
        version.append(0)
    for _ in range(draw.randint(2, 5)):
        reads = {(n, version[n]) for n in range(len(storages)) if draw.random() < 0.45}
        writes = (draw.randrange(len(storages)),) if storages and draw.random() < 0.35 else ()
        for number in writes:
            if draw.random() < 0.8:
                reads.add((number, version[number]))
            version[number] += 1
        makes = tuple(range(len(storages), len(storages) + draw.choice([0, 1, 1] if writes else [1, 1, 2])))
        for _ in makes:
            storages.append(HeldTensor(size_bytes=draw.randint(0, 9) * unit_bytes, saved=draw.random() < 0.6))
            version.append(0)
        steps.append(
            RerunCandidate(
                seconds=draw.choice([0.0, 1.0, 2.0, 5.0 * draw.random()]),
                reads=tuple(sorted(reads)),
                allocates=makes,
                writes=writes,
                must_run_once=draw.random() < 0.15,
            )
        )
    return SavedSetProblem(steps=tuple(steps), storages=tuple(storages))


@pytest.mark.slow
@pytest.mark.parametrize("unit_bytes", [1, 4096, 10**9])
@pytest.mark.parametrize("seed", range(16))
def test_no_set_of_storages_is_cheaper_at_any_limit(seed: int, unit_bytes: int) -> None:
    problem = random_problem(seed, unit_bytes)
    answers = every_answer(problem)
    free = {n for n, storage in enumerate(problem.storages) if storage.outside and not storage.size_bytes}
    assert fewest_bytes(problem) == min(size for size, _ in answers)
    for limit in sorted({near for size, _ in answers for near in (size - 1, size)}):
        best = min((seconds for size, seconds in answers if size <= limit), default=None)
        answer = cheapest(problem, limit)
        assert (answer is None) == (best is None)
        if answer is None or best is None:
            continue
        assert answer.kept_bytes == sum(problem.storages[n].size_bytes for n in answer.kept) <= limit
        assert answer.seconds == pytest.approx(best, abs=GAP * max(1.0, sum(s.seconds for s in problem.steps)))
        rerun = rerun_of(problem, {*answer.kept, *free})
        assert rerun is not None and rerun <= set(answer.rerun)


def test_sizes_without_a_common_divisor_are_counted_to_a_hundred_thousandth() -> None:
    draw = random.Random(0)
    problem = chain(*(draw.randint(10**8, 10**9) | 1 for _ in range(12)))
    everything = sum(storage.size_bytes for storage in problem.storages)
    for limit in (everything - 1, everything // 2, everything // 7, 0):
        answer = cheapest(problem, limit)
        assert answer is not None and answer.kept_bytes <= limit + 12 * everything / 100_000


@pytest.mark.parametrize("seed", range(0, 16, 3))
def test_the_frontier_goes_from_few_seconds_to_few_bytes(seed: int) -> None:
    problem = random_problem(seed, 4096)
    answers = frontier(problem, 6)
    assert answers[-1].kept_bytes == fewest_bytes(problem)
    for fast, small in itertools.pairwise(answers):
        assert fast.seconds <= small.seconds + GAP
    for answer in answers:
        cheapest_again = cheapest(problem, answer.kept_bytes)
        assert cheapest_again is not None and cheapest_again.seconds == pytest.approx(answer.seconds, abs=GAP * 30)


def test_a_larger_limit_is_never_slower_and_seconds_scale() -> None:
    problem = random_problem(5, 4096)
    slower = dataclasses.replace(
        problem, steps=tuple(dataclasses.replace(step, seconds=1e-6 * step.seconds) for step in problem.steps)
    )
    before = float("inf")
    for limit in range(fewest_bytes(problem), sum(s.size_bytes for s in problem.storages), 4096):
        answer, scaled = cheapest(problem, limit), cheapest(slower, limit)
        assert answer is not None and scaled is not None
        assert answer.seconds <= before + GAP and scaled.seconds == pytest.approx(
            1e-6 * answer.seconds, abs=1e-6 * GAP * 30
        )
        before = answer.seconds
