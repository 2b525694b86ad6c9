"""Checks a plan against its own run: corrects the seconds of stages where they are off, and solves again."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.distributed.ranks import together
from planner.explain.measured_step import Places
from planner.plans.offload_request import OffloadMode
from planner.plans.plan import Plan, chain_in
from planner.plans.profiling import profile
from planner.plans.solving import find_plan, replan, repriced
from planner.runtime.applier import apply, measure
from planner.runtime.plan_checks import check_device, check_inputs, check_precision, given_plan
from planner.training.solver_comparison import seconds_in_turns
from planner.units import format_bytes
from profiler.agreement import agreed, largest, made_by_rank0
from profiler.measurement.device_memory import give_back_freed_memory, ran_out
from profiler.measurement.measuring import Progress
from profiler.measurement.meter import Mark, MarkedPhases, Place, time_meter, typical_seconds
from profiler.measurement.planned_probe import PlannedProbe
from profiler.messages import tell
from profiler.workload.compiled_forwards import is_compiled, unwrapped
from profiler.workload.random_states import RandomState
from profiler.workload.snapshot import preserved
from profiler.workload.steps import check_workload, first_step
from profiler.workload.workload import Workload
from solvers import Chain, Option
from solvers.problem.schedule import RUNS

# Plans that are run at most, steps of each that are timed in turns with plain ones, and the share from which an option
# is corrected.
ROUNDS, REPEATS, OFF_BY = 3, 3, 0.1
_AGAIN = 0  # What a stage runs that is run again whole; its options are numbered from 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The bytes and seconds that an option was predicted to add to a stage, and those that it was measured to add.

    Attributes:
        option: its name; empty for recomputing the whole stage.
        stages: the stages in which it was seen; they do the same.
        predicted_seconds, measured_seconds: of one of them, beside those of keeping everything, at the plan's pace.
    """

    option: str
    stages: tuple[str, ...]
    predicted_seconds: float
    measured_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRound:
    """One plan checked against its own run. Seconds are of a whole step.

    Attributes:
        plan: the plan that was run.
        unplanned_seconds, planned_seconds: measured, in turns.
        corrected_seconds: what the plan foretells of itself after the corrections.
        corrections: of options that were off by more than a tenth.
    """

    plan: Plan
    unplanned_seconds: float
    planned_seconds: float
    corrected_seconds: float
    corrections: tuple[Correction, ...]

    @property
    def measured_slowdown(self) -> float:
        """Planned over unplanned seconds."""
        return self.planned_seconds / self.unplanned_seconds

    @property
    def corrected_slowdown(self) -> float:
        """As the corrected plan foretells it."""
        return self.corrected_seconds / self.plan.unplanned_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The fastest plan of those that were run, and what the rounds showed.

    Attributes:
        plan: with corrected seconds; where several were run, the one that was measured fastest.
        rounds: in order.
    """

    plan: Plan
    rounds: tuple[VerifiedRound, ...]


def corrected_here(workload: Workload, plan: Plan, *, progress: Progress | None = None) -> Plan:
    """Check a plan that was estimated for this device, by a step under it; make another where it does not hold.

    Args:
        workload: the training step, on the device; it is left as it was found.
        plan: made from an estimated profile.
        progress: called as ``progress(what, done, total)`` before each run.

    Returns:
        The plan, if a step under it stays within its budget. Otherwise a plan for the same budget, from a profile that
        is measured here.

    Raises:
        Infeasible: no plan fits the budget here.
        PlanMismatch: the plan is for another model or another precision.
        ProfileError: the step fails.
    """
    try:
        with apply(workload.model, plan):
            peak_bytes = measure(workload, repeats=1).peak_bytes
        holds, why = peak_bytes <= plan.budget_bytes, f"a step takes {format_bytes(peak_bytes)} here"
    except (RuntimeError, MemoryError, ValueError) as error:
        if not ran_out(error):
            raise
        holds, why = False, "memory runs out here"
    if agreed(holds):
        tell("planner", f"the estimated plan was checked: {why}, within its budget")
        return plan
    tell("planner", f"the estimated plan does not hold: {why}; profiling, and solving again for its budget")
    give_back_freed_memory(workload.device)
    measured = replace(profile(workload, progress=progress), target=plan.target)
    offload: OffloadMode = "never" if plan.link is None else "auto"
    return find_plan(measured, plan.budget_bytes, offload=offload, headroom=plan.headroom_bytes)


def verify(
    workload: Workload, plan: Plan, *, solver: str = "auto", time_limit_seconds: float | None = None
) -> Verification:
    """Run the plan for a few steps, and solve again with the measured seconds.

    Options whose seconds are off by more than a tenth are corrected. Planned and unplanned steps
    alternate, so that drift of the machine's speed affects both equally. The plan's own chain is solved again: the same
    stages, options and bytes, with other seconds. This is repeated for at most three plans, or until the plan no longer
    changes; the plan measured as fastest is returned, so the result is never slower than the first plan.

    Args:
        workload: the training step; its unplanned step has to fit. It is left as it was found.
        plan: a solved (not manual) plan for the workload.
        solver: the solver for the new plans, a name of ``solvers.solver_names()``.
        time_limit_seconds: for solvers that search.

    Returns:
        The plan to use, and what was measured in every round.

    Raises:
        PlanMismatch: the plan is for another model or another precision.
        ProfileError: the step fails.
        ValueError: the plan is manual, without its chain, or of a step that did not fit; the model is
            compiled, or the batch or the device another one.
    """
    check_workload(workload, "verify")
    plan = given_plan(plan, "verify")
    with together("verify"):
        return _verified(workload, plan, solver, time_limit_seconds)


def _verified(workload: Workload, plan: Plan, solver: str, time_limit_seconds: float | None) -> Verification:
    _check(workload, plan)
    rounds: list[VerifiedRound] = []
    candidates = [plan]
    with preserved(workload):
        randomness = RandomState()
        while True:
            tell("planner", f"checking the plan against its own steps: round {len(rounds) + 1} of {ROUNDS} at most")
            plain, planned = largest(_in_turns(workload, candidates[-1], randomness))
            chain, corrections = corrected(
                candidates[-1], [typical_seconds([run]) for run in plain], [typical_seconds([run]) for run in planned]
            )
            same = repriced(candidates[-1], chain)
            rounds.append(
                VerifiedRound(
                    plan=candidates[-1],
                    unplanned_seconds=_seconds(plain),
                    planned_seconds=_seconds(planned),
                    corrected_seconds=same.predicted_seconds,
                    corrections=corrections,
                )
            )
            left_bytes = plan.budget_bytes - plan.headroom_bytes
            again = made_by_rank0(
                partial(replan, same, left_bytes, solver=solver, time_limit_seconds=time_limit_seconds)
            )
            known = [candidate.schedule for candidate in candidates]
            if again.schedule in known or len(rounds) == ROUNDS:
                break
            candidates.append(again)
    best = candidates[0]
    if len(candidates) > 1:
        seconds = seconds_in_turns(workload, {str(number): each for number, each in enumerate(candidates)})
        best = candidates[agreed(int(min(seconds, key=lambda number: seconds[number])))]
    verified = repriced(best, chain, lower_bound_seconds=again.lower_bound_seconds)
    tell("planner", verified.in_one_line())
    return Verification(plan=verified, rounds=tuple(rounds))


def can_verify(workload: Workload, plan: Plan) -> bool:
    """Whether a plan can be checked against its own run: not where the unplanned step does not fit, or is compiled."""
    compiled = unwrapped(workload.model) is not workload.model or is_compiled(workload.model)
    return not (compiled or plan.frugal or plan.stated)


def _check(workload: Workload, plan: Plan) -> None:
    check_device(workload, plan)
    check_precision(workload.model, plan.precision, workload.autocast)
    chain_in(plan, "verify")
    if not can_verify(workload, plan):
        got = "made by hand" if plan.stated else "of a step that does not fit" if plan.frugal else ""
        raise ValueError(
            f"verify: {f'a plan {got}' if got else 'the plan of a compiled model'} cannot be verified; "
            "planner.measure takes its seconds and peak as it is"
        )


def _in_turns(workload: Workload, plan: Plan, randomness: RandomState) -> tuple[list[MarkedPhases], list[MarkedPhases]]:
    """Marked and timed steps without the plan and with it, each the second of two.

    The first one meets the allocator as the other way of running has left it, and is not counted.
    """
    places = Places(plan)
    runs: dict[bool, list[MarkedPhases]] = {False: [], True: []}
    with PlannedProbe(workload, places.calls, places.again) as probe:
        for turn in range(REPEATS):
            for planned in (False, True):
                with apply(workload.model, plan) if planned else contextlib.nullcontext():
                    randomness.restore()
                    if turn == 0:
                        check_inputs(workload, plan)
                        first_step(workload)
                    else:
                        probe.step(time_meter(workload.device))
                    randomness.restore()
                    runs[planned].append(probe.step(time_meter(workload.device)))
    return runs[False], runs[True]


def _seconds(runs: Sequence[MarkedPhases]) -> float:
    return statistics.median(sum(phase.seconds for _, phase in run) for run in runs)


_Seconds = tuple[float, float]  # in forward and in backward


@dataclass(frozen=True, slots=True)
class _Seen:
    """Stages that do the same under what a plan does with them: mean seconds beside those of keeping everything."""

    stages: tuple[int, ...]
    predicted: _Seconds
    measured: tuple[_Seconds, ...]  # one for each pair of steps

    @property
    def typical(self) -> _Seconds:
        """The median of the measured pairs."""
        return sorted(self.measured, key=sum)[len(self.measured) // 2]

    @property
    def is_off(self) -> bool:
        """Whether every pair of steps shows that it is, and in the same direction."""
        predicted = sum(self.predicted)
        off = [sum(each) - predicted for each in self.measured]
        margin = OFF_BY * abs(predicted)
        return all(more > margin for more in off) or all(more < -margin for more in off)


def corrected(
    plan: Plan, unplanned: Sequence[Mapping[Mark, float]], planned: Sequence[Mapping[Mark, float]]
) -> tuple[Chain, tuple[Correction, ...]]:
    """The plan's chain with the seconds that were measured, where every pair of steps says it is off by over a tenth.

    Options that did not run have what carrying out costs added per op that runs again, as it was found in those of the
    same menu that did, or else in all of them.

    Args:
        plan: that ran, with its chain.
        unplanned, planned: seconds by mark of steps without it and with it, in pairs.
    """
    chain = chain_in(plan)
    modules = [k for k, stage in enumerate(plan.stages) if stage.kind == "stage"]
    keeping = [chain.stages[k].options[0] for k in modules]
    foretold = sum(keep.forward_seconds + keep.backward_seconds for keep in keeping)
    places = {k: i for i, k in enumerate(modules)}
    steps = [sum(_at(step, phase, i) for i in places.values() for phase in _PHASES) for step in unplanned]
    pace = statistics.median(steps) / foretold if foretold > 0 and min(steps) > 0 else 1.0
    alike: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for k in modules:
        if (option := _what_ran(plan, k)) is not None:
            alike[_kind(plan, k), option].append(k)
    pairs = list(zip(unplanned, planned, strict=True))
    seen = {
        (kind, option): _Seen(
            tuple(stages),
            _mean([_foretold(chain, k, option) for k in stages]),
            tuple(_mean([_added(*pair, places[k], pace) for k in stages]) for pair in pairs),
        )
        for (kind, option), stages in alike.items()
    }
    off = {what: each for what, each in seen.items() if each.is_off}
    per_op = _seconds_per_op(plan, {what: each for what, each in off.items() if what[1] != _AGAIN})
    stages = tuple(
        replace(stage, options=tuple(_options(plan, chain, k, off, seen, per_op))) if k in places else stage
        for k, stage in enumerate(chain.stages)
    )
    return replace(chain, stages=stages), tuple(_correction(plan, what, each) for what, each in off.items())


_PHASES = ("forward", "backward")


def _at(step: Mapping[Mark, float], phase: str, place: int) -> float:
    return step.get(Mark(phase, Place("stage", place)), 0.0)  # type: ignore[arg-type]


def _added(unplanned: Mapping[Mark, float], planned: Mapping[Mark, float], place: int, pace: float) -> _Seconds:
    forward, backward = (_at(planned, phase, place) - _at(unplanned, phase, place) for phase in _PHASES)
    return forward / pace, (backward + _at(planned, "again", place)) / pace


def _mean(pairs: Sequence[_Seconds]) -> _Seconds:
    return statistics.fmean(pair[0] for pair in pairs), statistics.fmean(pair[1] for pair in pairs)


def _kind(plan: Plan, k: int) -> int:
    """Stages of one menu do the same; one without is alone."""
    return plan.stages[k].menu if plan.stages[k].menu >= 0 else -1 - k


def _what_ran(plan: Plan, k: int) -> int | None:
    """The option that a stage ran under, or that it ran again whole; None where it is kept, or does several things."""
    runs = [action for action in plan.schedule.actions if action.kind in RUNS and action.stage == k]
    if len(runs) == 1:
        return runs[0].option or None
    again = len(runs) == 2 and runs[0].option is None and runs[1].kind == "recompute" and runs[1].option == 0
    return _AGAIN if again else None


def _foretold(chain: Chain, k: int, option: int) -> tuple[float, float]:
    stage, keep = chain.stages[k], chain.stages[k].options[0]
    if option == _AGAIN:
        return stage.forward_seconds - keep.forward_seconds, keep.recompute_seconds
    chosen = stage.options[option]
    return chosen.forward_seconds - keep.forward_seconds, chosen.backward_seconds - keep.backward_seconds


def _seconds_per_op(plan: Plan, off: Mapping[tuple[int, int], _Seen]) -> dict[int | None, float]:
    """By menu, and under None over all: what an op that runs again was seen to take beyond what was foretold."""
    found: defaultdict[int | None, list[tuple[float, int]]] = defaultdict(list)
    for (menu, option), seen in off.items():
        row = sum(seen.typical) - sum(seen.predicted), len(plan.menus[menu].options[option - 1].rerun)
        found[menu].append(row)
        found[None].append(row)
    return {menu: sum(s for s, _ in rows) / max(1, sum(ops for _, ops in rows)) for menu, rows in found.items()}


def _options(
    plan: Plan,
    chain: Chain,
    k: int,
    off: Mapping[tuple[int, int], _Seen],
    seen: Mapping[tuple[int, int], _Seen],
    per_op: Mapping[int | None, float],
) -> Iterator[Option]:
    kind, (keep, *others) = _kind(plan, k), chain.stages[k].options
    if again := off.get((kind, _AGAIN)):
        keep = replace(keep, recompute_seconds=max(0.0, sum(again.typical) - again.predicted[0]))
    yield keep
    for number, option in enumerate(others, start=1):
        forward, backward = _foretold(chain, k, number)
        if found := off.get((kind, number)):
            forward, backward = (max(0.0, seconds) for seconds in found.typical)
        elif (kind, number) not in seen:
            ops = len(plan.menus[plan.stages[k].menu].options[number - 1].rerun)
            backward = max(0.0, backward + ops * per_op.get(kind, per_op.get(None, 0.0)))
        forward_seconds = keep.forward_seconds + forward
        yield replace(
            option,
            forward_seconds=forward_seconds,
            backward_seconds=keep.backward_seconds + backward,
            recompute_seconds=max(forward_seconds, keep.recompute_seconds),
        )


def _correction(plan: Plan, what: tuple[int, int], seen: _Seen) -> Correction:
    menu, option = what
    return Correction(
        option=plan.menus[menu].options[option - 1].name if option != _AGAIN else "",
        stages=tuple(plan.stages[k].name for k in seen.stages),
        predicted_seconds=sum(seen.predicted),
        measured_seconds=sum(seen.typical),
    )
