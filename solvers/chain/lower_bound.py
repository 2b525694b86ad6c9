"""Bounds on time that hold for every schedule of a chain within a budget, in milliseconds per budget.

Formulation: look at the start of the backward of each stage t. What is kept of the stages before it, the boundaries
that are alive, gradients, residues and what stage t itself needs have to fit. A stage kept by then holds the
boundaries before and after it: it reads the one and cannot be run again for the other. A stage not kept ran its first
forward for nothing and runs at least once more, from a boundary that is alive or that the stage before it, not kept
either, makes again. The cheapest such state is a shortest path along the chain (one step per stage: an option to keep,
or nothing; the boundary alive, or not) under one constraint on bytes. With a price per byte in place of the constraint
one sweep solves it for all t at once, and every price gives a bound; the largest over prices and stages counts.

With a link, offload units may be away at that moment. Their copies out ended before it, and their copies back begin
after it: the step's first part, up to the moment, takes no less than its computation and no less than the copies out,
the second part no less than its computation and the copies back. Any mean of the two, for either part, is a bound
again, in which a byte away has a price of its own; nine means for each part are tried.

Guarantee: no schedule within the budget is faster, persistent or not. Shared tensors count as no bytes.
Complexity: O(L K P) for L stages with K options and P prices (81 times that with a link), then O(L P) per budget.
Units: bytes and seconds.
Source: Lagrangian relaxation after Everett, "Generalized Lagrange multiplier method" (1963); the constraint along
the path after Handler and Zang, "A dual algorithm for the constrained shortest path problem" (1980).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np

from solvers.arrays import Floats
from solvers.problem.chain import Chain, Link, Option, Stage
from solvers.problem.deadline import check_deadline

_PRICES = 256  # 3200 raise the bound of random chains of 200 and 1000 stages by 0.001 %
_MEANS = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)  # weights of the copies in a part of the step
_SLACK = 1e-12  # relative, of all that is summed: rounding must not make the bound exceed an optimum


class _Weights(NamedTuple):
    """The weights of computation before the moment and after it, and of an absent byte."""

    before: float = 1.0
    after: float = 1.0
    away: float = math.inf  # nothing can be


_BOTH = _Weights()


def bound_seconds(chain: Chain, budget_bytes: int, link: Link | None = None) -> float:
    """Seconds that every schedule within the budget needs; infinite where the bound sees that none fits.

    >>> from solvers.problem.examples import equal_stages
    >>> [round(bound_seconds(equal_stages(3), b), 6) for b in (5, 8, 16)]
    [inf, 10.552415, 9.0]
    """
    return _bounds(chain, link if link is not None and link.usable else None).seconds(budget_bytes)


class _Bounds:
    """Cheapest priced states at the start of every backward, for every price."""

    def __init__(self, chain: Chain, link: Link | None) -> None:
        self._optimizer_peak_bytes = chain.optimizer_peak_bytes
        weightings = _weights(link)
        self._prices = _prices(chain, [weights.away for weights in weightings if 0 < weights.away < math.inf])
        self._seconds = [_sums(chain, weights, self._prices) for weights in weightings]
        only_bytes = _Weights(0.0, 0.0, math.inf if link is None else 0.0)
        self._least_bytes = _priced(chain, only_bytes, np.array([1.0]))[:, 0]
        self._fixed = np.array(_fixed_bytes(chain), dtype=np.float64)

    def seconds(self, budget_bytes: int) -> float:
        """The bound within a budget."""
        room = budget_bytes - self._fixed
        if budget_bytes < self._optimizer_peak_bytes or (self._least_bytes > room).any():
            return math.inf
        paid = self._prices * room[:, None]
        bounds = [seconds - paid - _SLACK * (seconds + np.abs(paid)) for seconds in self._seconds]
        return max(0.0, *(float(bound.max()) for bound in bounds))


_bounds = lru_cache(maxsize=2)(_Bounds)  # the sweep is remembered: a curve asks for a hundred budgets


def _weights(link: Link | None) -> list[_Weights]:
    if link is None:
        return [_BOTH]
    out, back = 1 / link.to_host_bytes_per_second, 1 / link.to_device_bytes_per_second
    return [_Weights(1 - a, 1 - b, a * out + b * back) for a, b in product(_MEANS, _MEANS)]


def _sums(chain: Chain, weights: _Weights, prices: Floats) -> Floats:
    """The result of ``_priced`` with the weighted seconds of all other stages; those after t are over by then."""
    least_seconds = (weights.before * _least_seconds(stage) for stage in reversed(chain.stages))
    later = list(accumulate(least_seconds, initial=0.0))[-2::-1]
    of_stage = [_least_seconds(stage, weights) for stage in chain.stages]
    return _priced(chain, weights, prices) + np.array([a + b for a, b in zip(of_stage, later, strict=True)])[:, None]


def _priced(chain: Chain, weights: _Weights, prices: Floats) -> Floats:
    """For each stage t and price the least of weighted seconds and paid bytes of all stages before t.

    The boundary before t is alive; what stages from t on cost, and what is there in any state, is left out.
    """
    away = np.minimum(prices, weights.away)  # the price of an offload unit's byte: on the device, or away
    alive, dead = np.zeros(prices.size), np.full(prices.size, math.inf)
    cheapest = []
    for k, stage in enumerate(chain.stages):
        check_deadline()
        cheapest.append(alive)
        before_bytes = chain.stages[k - 1].boundary_bytes if k else chain.resident_bytes
        either = np.minimum(alive - (prices - away) * min(before_bytes, sum(stage.offload_units)), dead)
        frees = k + 1 < len(chain.stages) and chain.stages[k + 1].linked
        again = _dropped_seconds(stage, weights, made_again=True) if frees else math.inf
        dead = either + again
        alive = np.minimum(alive + _kept(stage, weights, prices, away), either + _dropped_seconds(stage, weights))
        alive = alive + prices * stage.boundary_bytes
    return np.array(cheapest)


def _kept(stage: Stage, weights: _Weights, prices: Floats, away: Floats) -> Floats:
    costs = [
        _kept_seconds(option, weights)
        + prices * (option.kept_bytes - stage.residue_bytes)
        - (prices - away) * sum(option.offload_units)
        for option in stage.options
    ]
    return np.minimum.reduce(costs)


def _kept_seconds(option: Option, weights: _Weights) -> float:
    return weights.before * option.forward_seconds + weights.after * option.backward_seconds


def _dropped_seconds(stage: Stage, weights: _Weights, made_again: bool = False) -> float:
    """Least seconds of a stage that did not keep anything at first; infinite where it has to.

    ``made_again``: the boundary after it has to be made again too.
    """
    if not stage.recomputable:
        return math.inf
    again = min(option.recompute_seconds + option.backward_seconds for option in stage.options)
    if made_again:
        both = min(option.rerun_seconds + option.backward_seconds for option in stage.options)
        again = min(both, stage.forward_seconds + again)
    return weights.before * stage.forward_seconds + weights.after * again


def _least_seconds(stage: Stage, weights: _Weights = _BOTH) -> float:
    """Least seconds of a stage all of whose runs count as before the moment, and whose backward as after it."""
    kept = min(_kept_seconds(option, weights) for option in stage.options)
    if not stage.recomputable:
        return kept
    again = min(weights.before * o.recompute_seconds + weights.after * o.backward_seconds for o in stage.options)
    return min(kept, weights.before * stage.forward_seconds + again)


def _fixed_bytes(chain: Chain) -> list[int]:
    """Bytes at the backward of each stage in any state: all but kept stages (less their residues) and boundaries."""
    residues = accumulate((stage.residue_bytes for stage in chain.stages), initial=0)
    later = sum(stage.parameter_gradient_bytes for stage in chain.stages)
    fixed: list[int] = []
    for stage, earlier in zip(chain.stages, residues, strict=False):
        later -= stage.parameter_gradient_bytes
        own = min(
            o.kept_bytes + min(o.kept_output_bytes, stage.boundary_bytes) + o.backward_peak_bytes for o in stage.options
        )
        fixed.append(chain.resident_bytes + earlier + later + stage.gradient_bytes + own)
    return fixed


def _prices(chain: Chain, away: list[float]) -> Floats:
    """Prices per byte at which two choices of some stage cost the same, evenly picked, as many in equal ratios, and
    those of copies.
    """
    pairs = zip(chain.stages, [0, *(stage.boundary_bytes for stage in chain.stages)], strict=False)
    indifferent = sorted({price for stage, before in pairs for price in _indifferent_prices(stage, before)})
    if not indifferent:
        return np.array([0.0, *away])
    even = np.linspace(0, len(indifferent) - 1, min(len(indifferent), _PRICES // 2)).astype(np.int64)
    ratios = np.geomspace(indifferent[0] / 8, indifferent[-1] * 2, _PRICES // 2)
    return np.unique(np.concatenate(([0.0], np.array(indifferent)[even], ratios, away)))


def _indifferent_prices(stage: Stage, before_bytes: int) -> list[float]:
    """Prices at which two choices of a stage cost the same, any of the boundaries before and after it included."""
    kept = [(o.kept_bytes - stage.residue_bytes, o.forward_seconds + o.backward_seconds) for o in stage.options]
    extras = {0, before_bytes, stage.boundary_bytes, before_bytes + stage.boundary_bytes}
    choices = [(size + extra, seconds) for size, seconds in kept for extra in extras]
    if stage.recomputable:
        choices += [(extra, _dropped_seconds(stage, _BOTH)) for extra in (0, stage.boundary_bytes)]
    return [(b[1] - a[1]) / (a[0] - b[0]) for a in choices for b in choices if a[0] > b[0] and a[1] < b[1]]
