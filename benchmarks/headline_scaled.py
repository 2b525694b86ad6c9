"""The headline on a CPU: a small BERT at growing batches in the memory of its unplanned step on 4 sequences."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import planner
from benchmarks.headline_models import bert_small
from benchmarks.headline_rows import OFFLOAD_TIMES, Row
from benchmarks.one_step import peak_bytes_of, seconds_of
from planner.capacity.batch_limits import MODE_NAMES, TrainingMode
from planner.capacity.limit_search import PredictedLimits
from planner.capacity.scaling import scaling_over
from planner.units import format_bytes
from profiler.workload.workload import Workload

UNPLANNED = 4  # sequences that fit without a plan
PROFILED = (2, 3, 4)
MEASURED = (2, 5, 10, 12, 14)  # times the unplanned batch
PREDICTED = (16, 20)
# GB/s. PCIe's 12 GB/s to a V100 are 20 times the boundaries that BERT-Large makes there in a second (24 sentences x
# 24 layers x 1 MiB); 0.3 GB/s are as many times those of this model at 5 sentences a second (24 layers x 128 KiB).
LINK_GBPS = 0.3
FORM = "bert_small, eager, CPU"

Build = Callable[[int], Workload]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """What the scaled form gave: rows, and sentences on how they came about."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def scaled(
    rounds: int, *, build: Build | None = None, measured: Sequence[int] = MEASURED, limit: bool = True
) -> Scaled:
    """Plan for each batch from profiles of 2 to 4 sequences, then measure the batches and the unplanned step in turns.

    Args:
        rounds: in each, every batch takes one step, after one to warm up and one under the memory meter, beside
            as many unplanned steps as have its sentences.
        build: the workload with a number of sequences; ``bert_small`` where none is given.
        measured: times the unplanned batch.
        limit: measure one step of the largest batch that any plan fits, too, which takes minutes.
    """
    build = build or (lambda batch: bert_small(batch=batch))
    cap = planner.measure(build(UNPLANNED), repeats=1).peak_bytes
    _say(f"cap {format_bytes(cap)}; profiling")
    growth = scaling_over(build, PROFILED, menus=True, progress=lambda _: lambda *_: None)
    forecast = PredictedLimits(growth, cap, planner.Offload(link_gbps=LINK_GBPS))
    largest = forecast.largest("recompute", floor=UNPLANNED, step=1, vary="batch")
    batches, more = (_within(largest, times) for times in (measured, PREDICTED))
    rows = _measured_rows(build, forecast, batches, rounds)
    none = rows[0]
    rows += [_forecast_row(forecast, none, "recompute", batch) for batch in more]
    rows += [_limit_row(build, forecast, none, largest)] if limit else []
    rows += _offload_rows(forecast, none)
    fits = forecast.largest("none", floor=0, step=1, vary="batch")
    notes = (
        f"cap: {cap} bytes ({format_bytes(cap)}), the measured peak of an unplanned step on {UNPLANNED} sequences with "
        f"all model states: {fits} is the largest batch that fits without a plan",
        f"plans for every batch come from profiles of {', '.join(map(str, PROFILED))} sequences; {rounds} rounds, in "
        "each of which every batch takes a step, after unplanned steps on as many sentences; relative speed: median of "
        "the rounds, sentences per second: median of all",
        f"offload on the CPU is a prediction, over a link of {LINK_GBPS} GB/s",
        *growth.notes(),
    )
    return Scaled(rows=tuple(rows), notes=notes)


def _within(largest: int, multiples: Sequence[int]) -> list[int]:
    return [times * UNPLANNED for times in multiples if times * UNPLANNED <= largest]


def _measured_rows(build: Build, forecast: PredictedLimits, batches: Sequence[int], rounds: int) -> list[Row]:
    """The unplanned row, and one for each batch."""
    plans = [forecast.plan_at("none", UNPLANNED), *(forecast.plan_at("recompute", batch) for batch in batches)]
    trainings = [_Training(build(n), plan) for n, (plan, _) in zip([UNPLANNED, *batches], plans, strict=True)]
    peaks = [training.peak_bytes() for training in trainings]
    plain, *planned = trainings
    turns: list[list[tuple[float, float]]] = [[] for _ in batches]  # rates, unplanned and planned
    for number in range(rounds):
        _say(f"round {number + 1} of {rounds}")
        for own, batch, training in zip(turns, batches, planned, strict=True):
            # As long as the planned step: in a short burst a processor may be faster than it can stay.
            beside = sum(plain.seconds() for _ in range(batch // UNPLANNED))
            own.append((batch / beside, batch / training.seconds()))
    none = Row(
        form=FORM,
        way="no plan",
        batch=UNPLANNED,
        rate=statistics.median(rate for own in turns for rate, _ in own),
        predicted_peak_bytes=plans[0][1],
        measured_peak_bytes=peaks[0],
    )
    found = [none]
    for batch, own, peak in zip(batches, turns, peaks[1:], strict=True):
        rate, relative = statistics.median(b for _, b in own), statistics.median(b / a for a, b in own)
        found.append(_forecast_row(forecast, none, "recompute", batch, rate, relative, peak))
    return found


def _forecast_row(
    forecast: PredictedLimits,
    none: Row,
    mode: TrainingMode,
    batch: int,
    rate: float | None = None,
    relative: float | None = None,
    peak_bytes: int | None = None,
    remark: str = "",
) -> Row:
    """What is predicted of a batch, and what was measured as far as it was."""
    plan, expected = forecast.plan_at(mode, batch)
    predicted = forecast.throughput_at(batch, plan) / forecast.throughput_at(none.batch, None)
    return Row(
        form=FORM,
        way=MODE_NAMES[mode],
        batch=batch,
        rate=rate,
        base=none,
        relative=relative,
        predicted_relative=predicted,
        predicted_peak_bytes=expected,
        measured_peak_bytes=peak_bytes,
        remark=remark or ("" if rate is not None else "predicted"),
    )


def _limit_row(build: Build, forecast: PredictedLimits, none: Row, batch: int) -> Row:
    """The largest batch that any plan fits: its peak, and one step's seconds."""
    _say(f"the largest batch, {batch}")
    training = _Training(build(batch), forecast.plan_at("recompute", batch)[0])
    peak = training.peak_bytes()
    rate = batch / training.seconds()
    return _forecast_row(forecast, none, "recompute", batch, rate, None, peak, "the largest that fits; one step")


def _offload_rows(forecast: PredictedLimits, none: Row) -> list[Row]:
    largest = forecast.largest("offload", floor=UNPLANNED, step=1, vary="batch")
    batches = sorted({min(largest, round(OFFLOAD_TIMES * UNPLANNED)), largest})
    return [_forecast_row(forecast, none, "offload", batch) for batch in batches]


class _Training:
    """A workload in training, with or without a plan."""

    def __init__(self, workload: Workload, plan: planner.Plan | None) -> None:
        self._workload = workload
        self._plan = plan

    def peak_bytes(self) -> int:
        """Measured in the second step: the first one makes the optimizer's states."""
        with self._planned():
            self._workload.step()
            self._workload.zero_grad()
            return peak_bytes_of(self._workload)

    def seconds(self) -> float:
        """Of one more step; putting the plan on and off is not timed."""
        with self._planned():
            return seconds_of(self._workload)

    def _planned(self):
        return nullcontext() if self._plan is None else planner.apply(self._workload.model, self._plan)


def _say(text: str) -> None:
    print(f"headline: {text}", file=sys.stderr, flush=True)
