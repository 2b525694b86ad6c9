"""A bound on time that holds for every schedule of a chain within a budget, in milliseconds.

Formulation: look at the start of the backward of each stage t. A stage before t that is not kept by then ran its
first forward for nothing and has to run at least once more; what is kept, with the inputs it pins, has to fit beside
gradients, residues and what stage t itself needs. The cheapest way to pay for that is a multiple-choice knapsack over
the menus (one choice per stage: an option to keep, or nothing), and its linear relaxation is solved greedily on the
convex hull of each menu. The bound is the largest one over all t.

Guarantee: no schedule within the budget is faster, persistent or not. Complexity: O(L K log K) to build and O(L K)
per stage for K hull edges in all. Units: bytes and seconds.
Source: linear multiple-choice knapsack after Sinha and Zoltners, "The multiple-choice knapsack problem" (1979).
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import numpy as np

from solvers.chain import Chain

_SLACK = 1e-12  # relative: summing floats in another order must not make the bound exceed an optimum


def bound_seconds(chain: Chain, budget_bytes: int) -> float:
    """Seconds that every schedule within the budget needs; infinite where the bound sees that none fits.

    >>> from solvers.chain import Option, Stage
    >>> way = Option(forward_seconds=1, backward_seconds=2, kept_bytes=4, forward_peak_bytes=6,
    ...              backward_peak_bytes=1, recompute_seconds=1, recompute_peak_bytes=4)
    >>> stage = Stage(name="s", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    >>> [round(bound_seconds(Chain(stages=(stage,) * 3), b), 6) for b in (5, 8, 16)]
    [inf, 10.5, 9.0]
    """
    if budget_bytes < chain.other_peak_bytes:
        return math.inf
    menus = _Menus(chain)
    return max(menus.bound(t, budget_bytes) for t in range(len(chain.stages))) * (1 - _SLACK)


class _Menus:
    """Per stage the convex hull of (bytes, seconds) over its choices, and all hull edges, steepest first."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        hulls = [_hull(_choices(chain, k)) for k in range(len(chain.stages))]
        self.cheapest = np.array([hull[-1][1] for hull in hulls])
        self.dearest = np.array([hull[0][1] for hull in hulls])
        self.least = [0, *accumulate(hull[0][0] for hull in hulls)]
        edges = [(k, b[0] - a[0], a[1] - b[1]) for k, hull in enumerate(hulls) for a, b in pairwise(hull)]
        edges.sort(key=lambda edge: -edge[2] / edge[1])
        self.owner = np.array([edge[0] for edge in edges], dtype=np.int64)
        self.weights = np.array([edge[1] for edge in edges], dtype=np.float64)
        self.gains = np.array([edge[2] for edge in edges], dtype=np.float64)

    def bound(self, t: int, budget_bytes: int) -> float:
        """Seconds needed because of what can be kept at the start of the backward of stage t."""
        room = budget_bytes - _fixed_bytes(self.chain, t) - self.least[t]
        if room < 0:
            return math.inf
        mine = self.owner < t
        weights, gains = self.weights[mine], self.gains[mine]
        share = np.clip((room - (np.cumsum(weights) - weights)) / weights, 0, 1) if weights.size else weights
        return float(self.dearest[:t].sum() + self.cheapest[t:].sum() - (share * gains).sum())


Choice = tuple[int, float]


def _choices(chain: Chain, k: int) -> list[Choice]:
    """What each way of treating a stage adds to the bytes at a later backward, and the least seconds it means."""
    stage = chain.stages[k]
    pinned = _input_bytes(chain, k) if stage.linked else 0  # where it is not linked the input stays in any case
    found = [
        (way.kept_bytes - stage.residue_bytes + pinned, way.forward_seconds + way.backward_seconds)
        for way in stage.options
    ]
    if stage.recomputable:
        again = min(min(way.forward_seconds, way.recompute_seconds) + way.backward_seconds for way in stage.options)
        found.append((0, stage.forward_seconds + again))
    return found


def _input_bytes(chain: Chain, k: int) -> int:
    return chain.stages[k - 1].boundary_bytes if k else 0


def _hull(choices: list[Choice]) -> list[Choice]:
    """The choices on the lower left convex hull: rising bytes, falling seconds, steepest first."""
    hull: list[Choice] = []
    for size, seconds in sorted(choices):
        if hull and seconds >= hull[-1][1]:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], (size, seconds)):
            hull.pop()
        hull.append((size, seconds))
    return hull


def _above(a: Choice, b: Choice, c: Choice) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (a[1] - b[1]) * (c[0] - a[0]) <= (a[1] - c[1]) * (b[0] - a[0])


def _fixed_bytes(chain: Chain, t: int) -> int:
    """Bytes at the backward of stage t whatever is kept of the stages before it, as far as they are certain."""
    stages, stage = chain.stages, chain.stages[t]
    held = chain.resident_bytes + stage.gradient_bytes + sum(s.parameter_gradient_bytes for s in stages[t + 1 :])
    held += sum(s.residue_bytes for s in stages[:t])
    held += sum(_input_bytes(chain, j) for j in range(t) if not stages[j].linked) + _input_bytes(chain, t)
    return held + min(
        way.kept_bytes + min(way.kept_output_bytes, stage.boundary_bytes) + way.backward_peak_bytes
        for way in stage.options
    )
