"""Seconds of what is timed in several steps, without stalls and without the drift between steps."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Sample(NamedTuple):
    """One timing of one thing, in one step."""

    step: int
    what: Hashable
    seconds: float


def steady_seconds(samples: Sequence[Sample]) -> dict[Hashable, float]:
    """What each thing takes at the pace of a typical step.

    A machine stalls and never hurries, so of several timings the lower quartile
    counts. It may be slower throughout a whole step, as others use it: every
    step's pace is the median, over the things timed in it, of their seconds there
    over their typical ones, and timings are divided by it before they count. What is timed once shows no pace.

    >>> slow = [Sample(0, "a", 2.0), Sample(0, "b", 4.0)]
    >>> steady_seconds([*slow, Sample(1, "a", 1.0), Sample(1, "b", 2.0)])
    {'a': 1.0, 'b': 2.0}
    """
    typical = _quartiles(samples)
    paces: dict[int, list[float]] = {}
    times = Counter(sample.what for sample in samples)
    for step, what, seconds in samples:
        if typical[what] > 0 and times[what] > 1:
            paces.setdefault(step, []).append(seconds / typical[what])
    # The quartile is the pace of a quick step: none is counted as quicker.
    pace = {step: max(1.0, statistics.median(ratios)) for step, ratios in paces.items()}
    return _quartiles([Sample(step, what, seconds / pace.get(step, 1.0)) for step, what, seconds in samples])


def _quartiles(samples: Sequence[Sample]) -> dict[Hashable, float]:
    seconds_of: dict[Hashable, list[float]] = {}
    for sample in samples:
        seconds_of.setdefault(sample.what, []).append(sample.seconds)
    return {what: sorted(seconds)[len(seconds) // 4] for what, seconds in seconds_of.items()}
