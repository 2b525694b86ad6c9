"""Where a search over sizes begins: the smallest size that a target takes, and real unplanned steps above it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from planner.capacity.scaling import whole_at
from planner.capacity.size_bisection import MOST_STEPS
from planner.capacity.step_trial import Build, Notify, Trial, has_room, measured_states_bytes, release, run_trial
from planner.targets import NoTarget
from profiler.measurement.device_memory import ran_out

STANDING = 6  # sizes in a row with one peak; profiles still show what grows below the optimizer's step
STARTS = 10  # doublings of the step in search of a size that the target takes: 512 steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStart:
    """Where a search begins.

    Attributes:
        smallest: the smallest size whose step runs.
        step: sizes are multiples of it.
        states_bytes: parameters, buffers, gradients and optimizer states at ``smallest``.
        device: of the model.
        notes: what a person should know, one sentence each.
    """

    smallest: int
    step: int
    states_bytes: int
    device: torch.device
    notes: tuple[str, ...] = ()


def search_start(build: Build, vary: str, step: int, report: Notify) -> SearchStart:
    """Try the step, twice the step and so on, until the target takes one and the model trains with it.

    Raises:
        ValueError: the target takes none of them (the first refusal is said), or the device has no room for a step.
    """
    first_refusal: ValueError | None = None
    for doubling in range(STARTS):
        size = step << doubling
        report(f"{vary}={size}: states")
        release()
        try:
            workload = build(size)
            states, device = measured_states_bytes(workload), workload.device
        except NoTarget:
            raise  # other sizes would not help
        except ValueError as error:
            if ran_out(error):
                raise ValueError(
                    f"max-batch: expected room for an unplanned step of {vary}={size}, which is to be profiled, got "
                    "too little on this device; make the model smaller, or take a device with more memory"
                ) from error
            first_refusal = first_refusal or error
            continue
        unit = _unit(build, size, step)
        notes = (f"{vary}: multiples of {unit} are tried, as {size + unit // 2} is refused",) if unit > step else ()
        return SearchStart(smallest=size, step=unit, states_bytes=states, device=device, notes=notes)
    assert first_refusal is not None
    last = step << STARTS - 1
    raise ValueError(
        f"{first_refusal} (so with {vary}={step} and its doubles up to {last}; where only multiples of another number "
        "are taken, give that with --step)"
    ) from first_refusal


def _unit(build: Build, size: int, step: int) -> int:
    """How far the next size lies: the step, or where that is refused, the first double that is taken."""
    unit = step
    while unit < size and not takes(build, size + unit):
        unit *= 2
    return unit


def takes(build: Build, size: int) -> bool:
    """Whether the target takes a size and the model trains with it: many refuse one only in their forward."""
    try:
        measured_states_bytes(build(size))
    except ValueError as error:
        return ran_out(error)  # there is no room for it here, which is another question
    return True


def doubling_steps(
    build: Build, start: SearchStart, vary: str, budget_bytes: int, report: Notify
) -> tuple[list[Trial], int | None]:
    """Real unplanned steps at doubled sizes, as long as they are taken, predicted to fit and have room.

    With the size that the target did not take, if it came to one.
    """
    trials: list[Trial] = []
    size = start.smallest
    while size <= MOST_STEPS * start.step:
        report(f"{vary}={size}: a step")
        try:
            trials.append(run_trial(build, size, None, repeats=1))
        except ValueError:
            if not trials:
                raise
            return trials, size  # the target takes no such size, whatever the memory
        if len(trials) >= STANDING and len({tried.peak_bytes for tried in trials[-STANDING:]}) == 1:
            break
        size *= 2
        expected_bytes = _expected_bytes(trials, size, start.states_bytes)
        if not trials[-1].fits(budget_bytes) or expected_bytes > budget_bytes:
            break
        if not has_room(start.device, expected_bytes, start.states_bytes):
            break
    return trials, None


def _expected_bytes(trials: list[Trial], size: int, states_bytes: int) -> int:
    """The peak at the next size by the last three; after the first one, all but the states doubles."""
    peaks = [tried.peak_bytes or 0 for tried in trials[-3:]]
    if len(peaks) == 1:
        return peaks[0] + max(0, peaks[0] - states_bytes)
    return whole_at([tried.size for tried in trials[-3:]], peaks, size, curved=True)
