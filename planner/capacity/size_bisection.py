"""The largest size for which something holds: found by doubling and halving, or guessed first and then tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MOST_STEPS = 2**30  # whatever still fits then does not grow


def largest_fitting(fits: Callable[[int], bool], *, floor: int, step: int) -> int:
    """The largest multiple of ``step`` above ``floor`` that fits, where all smaller ones do; ``floor`` if none does.

    Doubles the distance until something does not fit, then halves it. ``MOST_STEPS`` above the floor are the end.

    >>> largest_fitting(lambda size: size <= 77, floor=0, step=4)
    76
    """
    low, stride = floor, step
    while stride < MOST_STEPS * step and fits(low + stride):
        low, stride = low + stride, 2 * stride
    high = low + stride
    while high - low > step:
        middle = _between(low, high, step)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _between(low: int, high: int, step: int) -> int:
    return low + max(1, (high - low) // step // 2) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectionResult:
    """What trying came to.

    Attributes:
        size: the largest that is known to fit.
        tried: it was tried itself, and fitted.
        next_fails: the next one was tried, and did not; False where it was not tried.
    """

    size: int
    tried: bool
    next_fails: bool


def bisect_size(
    guess: int, attempt: Callable[[int], bool | None], *, floor: int, step: int, tries: int
) -> BisectionResult:
    """Try ``guess``, the size behind it, and where that says otherwise the sizes around, until the limit is found.

    Args:
        guess: the predicted limit, ``floor`` or more.
        attempt: True where a size fits, False where it does not, None where it cannot be tried.
        floor: known to fit.
        step: sizes lie so far apart.
        tries: the most sizes to try.

    >>> bisect_size(5, lambda size: size <= 7, floor=0, step=1, tries=9)
    BisectionResult(size=7, tried=True, next_fails=True)
    """
    low, high, stride = floor, None, step
    size = guess if guess > floor else floor + step
    for _ in range(tries):
        outcome = attempt(size)
        if outcome is None:
            return BisectionResult(size=max(low, guess if high is None else low), tried=low > floor, next_fails=False)
        low, high = (size, high) if outcome else (low, size)
        if high is not None and high - low <= step:
            break
        if high is None:
            size, stride = low + stride, 2 * stride
        elif size == guess and not outcome:
            size = max(floor + step, high - step)
        else:
            size = _between(low, high, step)
    return BisectionResult(size=low, tried=low > floor, next_fails=high is not None and high - low <= step)
