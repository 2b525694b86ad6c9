"""Binomial checkpointing, revolve: optimal for uniform chains in closed form, a heuristic for all others.

Formulation: s slots hold boundaries (the chain's input is resident and takes none); a run of n stages goes forward
to stage q, holds the boundary before it, answers the n - q stages behind it with one slot less, then the q stages
before it with all slots. ``runs(n, s) = min over q: q + runs(n - q, s - 1) + runs(q, s)``, ``runs(1, s) = 1``.
Chains with fixed or unlinked stages are cut into runs that may be dropped together, each with slots of its own.

Guarantee: the fewest forward runs for n stages of equal cost of which one at a time is kept, beside s boundaries:
``forward_runs(n, s)``. For unequal stages none: the slots count boundaries, not bytes.
Complexity: O(1) per split, so O(runs) per schedule. Units: stages and slots.
Paper: Griewank and Walther, "Algorithm 799: revolve, an implementation of checkpointing for the reverse or adjoint
mode of computational differentiation" (2000), section 2 (the closed form) and section 3 (the splits).
"""

from __future__ import annotations

from math import comb

from solvers.chain.baselines import Segment, droppable_runs
from solvers.chain.persistent import PersistentChoice, persistent_schedule
from solvers.problem.chain import Chain
from solvers.problem.plain_data import is_whole
from solvers.problem.schedule import Schedule

_CANDIDATES = 48  # slot numbers tried: all for short chains, in equal ratios for long ones, whose curve is smooth
_MOST_REPEATS = 12  # of long chains; 1000 stages need four slots for it, and half a million runs with one


def forward_runs(n: int, s: int) -> int:
    """Forward runs, first ones included, that n uniform stages need with s slots.

    Args:
        n: stages, at least 1.
        s: boundaries that may be held at once, at least 1; the resident input is not counted.

    Raises:
        ValueError: n or s is no whole number above zero.

    >>> [forward_runs(10, 3), forward_runs(50, 5), forward_runs(100, 10)]
    [25, 172, 322]
    """
    _check("stages", n)
    _check("slots", s)
    t = _repeats(n, s)
    return n + t * n - (comb(s + t, t - 1) if t else 0)


def schedules(chain: Chain) -> list[Schedule]:
    """One schedule per useful number of slots, up to as many as leave every stage two runs at most.

    >>> from solvers.problem.examples import equal_stages
    >>> [schedule.forward_runs() for schedule in schedules(equal_stages(4))]
    [10, 8, 7]
    """
    runs = droppable_runs(chain)
    longest = max(run.end - run.start for run in runs)
    candidates = (_schedule(len(chain.stages), runs, slots) for slots in _slot_numbers(longest))
    return list(dict.fromkeys(candidates))


def _schedule(count: int, runs: list[Segment], slots: int) -> Schedule:
    run_of = [run for run in runs for _ in range(run.start, run.end)]

    def choose(start: int, end: int, free_slots: int) -> tuple[PersistentChoice, int, int]:
        if start == end:
            return PersistentChoice("recompute", 0), 0, 0
        run = run_of[start]
        last = run.end == count
        if run.kept or (last and start + 1 == count):
            return PersistentChoice("keep", 0), slots, 0
        stop = end + 1 if end < count else run.end if last else run.end + 1  # all that follows counts as one stage more
        q = start + _split(stop - start, free_slots)
        return PersistentChoice("drop", q), free_slots - 1 if q < run.end else slots, free_slots

    return persistent_schedule(count, choose, slots)


def _split(n: int, s: int) -> int:
    """The number of the n > 1 stages to run before the next boundary is held, for the fewest runs with s slots."""
    t = _repeats(n, s)
    return max(1, comb(s + t - 2, s) if t > 1 else 0, n - comb(s + t - 1, s - 1))


def _repeats(n: int, s: int) -> int:
    """The smallest t with C(s + t, s) >= n: no stage is run again more than t times."""
    t, reach = 0, 1
    while reach < n:
        t += 1
        reach = reach * (s + t) // t
    return t


def _slot_numbers(longest: int) -> list[int]:
    most = max(1, longest - 1)
    if most <= _CANDIDATES:
        return list(range(1, most + 1))
    least = next(slots for slots in range(1, most + 1) if _repeats(longest, slots) <= _MOST_REPEATS)
    return sorted({round(least * (most / least) ** (i / (_CANDIDATES - 1))) for i in range(_CANDIDATES)})


def _check(what: str, value: int) -> None:
    if not is_whole(value) or value < 1:
        raise ValueError(f"{what}: expected a whole number above zero, got {value!r}; correct it")
