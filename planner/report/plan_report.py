"""The contents of the report of a plan, gathered from the plan alone, and from a measurement where there is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from planner.explain.op_decisions import OpDecision, grouped_decisions, groups_of_stages
from planner.explain.peak import Peak, PeakPart, PeakRow, peak_rows, peak_title, predicted_moments
from planner.explain.tables import losses_in_short
from planner.explain.timeline import Timeline, predicted_timelines, seconds_outside_chain_of
from planner.plans.plan import Plan, PlannedStage, chain_in, pieces_in_words
from planner.plans.solving import OFFLOAD_ONLY, schedule_fields
from planner.report.commands import LeverRow, lever_rows
from planner.units import counted, exact_bytes, format_bytes, format_seconds, names_in_short
from profiler.op_graph import kind_of
from solvers import Problem, Solution, frontier
from solvers.chain import baselines

CURVE_POINTS = 40  # more are not told apart in a picture

_LITTLE = 0.005  # of the unplanned step: said as no time
_PEAK_NAMES = ("with the plan", "without the plan", "measured with the plan")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Measurements of a plan; None for those that were not made.

    Attributes:
        peak_bytes, seconds: of the planned step.
        unplanned_peak_bytes, unplanned_seconds: of the step without it.
        losses: of training steps.
        timelines: of both steps.
        peak: of the planned step, explained.
    """

    peak_bytes: int
    seconds: float
    unplanned_peak_bytes: int | None = None
    unplanned_seconds: float | None = None
    losses: tuple[float, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    peak: Peak | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedStep:
    """A predicted step over time, with what is alive in each of its actions."""

    timeline: Timeline
    history: AliveHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTable:
    """Where the bytes of a peak come from; ``name`` says which one it is, ``title`` at which moment."""

    name: str
    title: str
    peak_bytes: int
    rows: tuple[PeakRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything that the report of a plan says.

    Attributes:
        sentence: the answer.
        facts: names and what is said of each.
        steps: without the plan and with it.
        curve: plans at other budgets, by rising peak; empty where the plan has none.
        decisions, ops: what the plan does.
        peaks: of the planned step, of the unplanned one, and as measured where that is known.
        levers: what else would help.
        plan_file: of the plan, as commands name it.
    """

    plan: Plan
    sentence: str
    facts: tuple[tuple[str, str], ...]
    steps: tuple[ExplainedStep, ...]
    curve: tuple[Plan, ...]
    decisions: tuple[DecisionRow, ...]
    ops: tuple[OpTable, ...]
    peaks: tuple[PeakTable, ...]
    levers: tuple[LeverRow, ...]
    measured: MeasuredRun | None = None
    plan_file: str | Path = "plan.json"


def report_of_plan(
    plan: Plan,
    *,
    measured: MeasuredRun | None = None,
    plan_file: str | Path = "plan.json",
) -> PlanReport:
    """Gather the report of a plan.

    Args:
        plan: with its chain.
        measured: what was measured of it.
        plan_file: of the plan, which the commands name.

    Raises:
        ValueError: the plan is of an older release, without its chain.
    """
    steps, peaks = _steps_and_peaks(plan)
    if measured is not None and measured.peak is not None:
        peaks = [*peaks, measured.peak]
    plans = with_plan(plan, plans_of_curve(plan))
    return PlanReport(
        plan=plan,
        sentence=sentence_of(plan),
        facts=tuple(facts_of(plan, measured)),
        steps=tuple(steps),
        curve=tuple(plans),
        decisions=decision_rows(plan),
        ops=op_tables(plan),
        peaks=tuple(_peak_table(peak, plan, name) for name, peak in zip(_PEAK_NAMES, peaks, strict=False)),
        levers=lever_rows(plan, plans, plan_file),
        measured=measured,
        plan_file=plan_file,
    )


def predicted_steps(plan: Plan) -> list[ExplainedStep]:
    """The step without a plan and the planned one, explained action by action."""
    return _steps_and_peaks(plan)[0]


def _steps_and_peaks(plan: Plan) -> tuple[list[ExplainedStep], list[Peak]]:
    """Both steps, and the peaks of the planned one and the other."""
    chain = chain_in(plan)
    timelines = predicted_timelines(
        chain, plan.schedule, link=plan.link, seconds_outside_chain=seconds_outside_chain_of(plan, chain)
    )
    schedules = (baselines.keep_all(chain)[0], plan.schedule)
    moments = [
        [*predicted_moments(chain, schedule, timeline, plan=plan)]
        for schedule, timeline in zip(schedules, timelines, strict=True)
    ]
    steps = [
        ExplainedStep(timeline=timeline, history=history_of(of_step))
        for timeline, of_step in zip(timelines, moments, strict=True)
    ]
    peaks = [max(of_step, key=lambda moment: moment.peak_bytes) for of_step in moments]
    return steps, peaks[::-1]


def with_plan(plan: Plan, plans: Sequence[Plan]) -> list[Plan]:
    """The plans of a curve and the plan itself, without those that it beats; none where there is no curve."""
    others = [
        each
        for each in plans
        if each.predicted_peak_bytes < plan.predicted_peak_bytes or each.predicted_seconds < plan.predicted_seconds
    ]
    return sorted([*others, plan], key=lambda each: each.predicted_peak_bytes) if plans else []


def _peak_table(peak: Peak, plan: Plan, name: str) -> PeakTable:
    rows = peak_rows(peak, plan)
    return PeakTable(name=name, title=peak_title(peak), peak_bytes=peak.peak_bytes, rows=tuple(rows))


def sentence_of(plan: Plan) -> str:
    """The answer in one sentence."""
    share = plan.predicted_peak_bytes / plan.unplanned_peak_bytes
    extra = plan.slowdown - 1
    cost = "no extra time" if extra < _LITTLE else f"{extra:.0%} more time"
    done = [f"{counted(plan.recomputed_ops, 'op')} run again in backward"] if plan.recomputed_ops else []
    done += [f"up to {format_bytes(plan.host_bytes)} wait in host memory"] if plan.host_bytes else []
    how = f": {' and '.join(done)}" if done else ": everything is kept"
    estimated = "A" if plan.estimate is None else f"Estimated for {plan.estimate.device}: a"
    return (
        f"{estimated} training step of {plan.model_class} peaks at {format_bytes(plan.predicted_peak_bytes)} instead "
        f"of {format_bytes(plan.unplanned_peak_bytes)} ({share:.0%}), for {cost}{how}."
    )


def facts_of(plan: Plan, measured: MeasuredRun | None) -> list[tuple[str, str]]:
    """The claims of a plan, its measurements, and how good it is."""
    spare_bytes = plan.budget_bytes - plan.predicted_peak_bytes
    proven = f"no such plan is faster than {format_seconds(plan.lower_bound_seconds)}"
    good = "optimal: none is faster" if plan.status == "optimal" else f"at most {plan.gap:.1%} could be saved; {proven}"
    size = ", ".join("x".join(map(str, shape)) for shape in plan.input_shapes) or "any"
    return [
        ("Predicted peak", exact_bytes(plan.predicted_peak_bytes)),
        ("Budget", f"{format_bytes(plan.budget_bytes)}, {format_bytes(spare_bytes)} to spare"),
        ("Without the plan", f"{format_bytes(plan.unplanned_peak_bytes)}, {format_seconds(plan.unplanned_seconds)}"),
        ("Predicted time", f"{format_seconds(plan.predicted_seconds)}, {plan.slowdown:.2f} times that"),
        *(_measured_facts(measured) if measured is not None else []),
        ("How good", f"{plan.solver}: {good}"),
        *([] if plan.estimate is None else [("Estimated", plan.estimate.in_words())]),
        ("Model", f"{plan.model_class}, {plan.precision} on {plan.device}, inputs {size}"),
        *(("In pieces", line) for line in (pieces_in_words(plan.pieces) if plan.pieces else ())),
        *(("Stated by hand", line) for line in plan.stated),
    ]


def _measured_facts(measured: MeasuredRun) -> list[tuple[str, str]]:
    rows = [("Measured peak", exact_bytes(measured.peak_bytes)), ("Measured time", format_seconds(measured.seconds))]
    if measured.unplanned_peak_bytes is not None and measured.unplanned_seconds is not None:
        without = f"{format_bytes(measured.unplanned_peak_bytes)}, {format_seconds(measured.unplanned_seconds)}"
        rows.append(("Measured without", without))
    if measured.losses:
        rows.append(("Losses", losses_in_short(measured.losses)))
    return rows


def plans_of_curve(plan: Plan) -> list[Plan]:
    """Plans that no other one of their method beats, each with its own peak as its budget.

    They are solved for over the plan's link, ``rotor``'s where it has none; manual rules do not bind them.
    A plan for several micro-batches under way, of which each budget has its own problem, has no curve.
    """
    if plan.in_flight:
        return []
    chain = chain_in(plan)
    seconds_outside_chain = plan.seconds_outside(chain)
    solver = OFFLOAD_ONLY if plan.offload_only else "rotor" if plan.link is None else "auto"
    plans = []
    for solution in _thinned(frontier(chain, solver, link=plan.link)):
        assert solution.peak_bytes is not None
        problem = Problem(chain=chain, budget_bytes=solution.peak_bytes, link=plan.link)
        fields = schedule_fields(problem, solution, plan.stages, plan.menus, seconds_outside_chain)
        plans.append(replace(plan, budget_bytes=solution.peak_bytes, headroom_bytes=0, stated=(), **fields))
    return plans


def _thinned(items: Sequence[Solution]) -> list[Solution]:
    """At most ``CURVE_POINTS`` of them, the first and the last included."""
    if len(items) <= CURVE_POINTS:
        return [*items]
    return [items[round(k * (len(items) - 1) / (CURVE_POINTS - 1))] for k in range(CURVE_POINTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveHistory:
    """The things alive in each action of a step.

    Attributes:
        labels: of each thing what it is there for, the op that made it, and the module that called that.
        changes: per action the things whose bytes differ from those in the action before: position of the label, and
            bytes, 0 for what is gone.
    """

    labels: tuple[tuple[str, str, str], ...]
    changes: tuple[tuple[tuple[int, int], ...], ...]

    def at(self, action: int) -> dict[tuple[str, str, str], int]:
        """Bytes alive in an action, by label."""
        sizes: dict[int, int] = {}
        for changes in self.changes[: action + 1]:
            sizes.update(changes)
        return {self.labels[number]: size for number, size in sizes.items() if size}


def history_of(moments: Iterable[Peak]) -> AliveHistory:
    """The history of a step whose actions are explained one by one."""
    numbers: dict[tuple[str, str, str], int] = {}
    before: dict[int, int] = {}
    changes = []
    for moment in moments:
        now: dict[int, int] = {}
        for part in moment.parts:
            number = numbers.setdefault(_label(part), len(numbers))
            now[number] = now.get(number, 0) + part.size_bytes
        names = dict.fromkeys([*before, *now])
        changed = [(k, now.get(k, 0)) for k in names if now.get(k, 0) != before.get(k, 0)]
        changes.append(tuple(changed))
        before = now
    return AliveHistory(labels=tuple(numbers), changes=tuple(changes))


def _label(part: PeakPart) -> tuple[str, str, str]:
    module = ".".join(name for name in (part.stage, part.module) if name)
    kind = kind_of(part.op)
    return part.what, kind, "" if module == kind else module  # An op outside of all modules stands for its own.


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """Stages with the same decision.

    Attributes:
        where: their names in short.
        module_class: empty of what runs outside of stages.
        decision: what happens to them.
        count: how many stages.
        kept_bytes: that all of them keep from forward to backward, what waits in host memory included.
        freed_bytes: that they would keep without the plan, and do not.
        sent_bytes: to host memory.
        runs: forwards of each in one step.
        extra_seconds: that the plan adds to all of them.
    """

    where: str
    module_class: str
    decision: str
    count: int
    kept_bytes: int
    freed_bytes: int
    sent_bytes: int
    runs: int
    extra_seconds: float


class OpTable(NamedTuple):
    """The ops of stages that do the same, alike ones together."""

    title: str
    rows: tuple[OpDecision, ...]


def decision_rows(plan: Plan) -> tuple[DecisionRow, ...]:
    """The decisions of a plan, stages with the same decision together, in the order of the step."""
    return tuple(_rows_of(plan))


def _rows_of(plan: Plan) -> Iterator[DecisionRow]:
    groups: dict[tuple[object, ...], list[PlannedStage]] = {}
    for stage in plan.stages:
        done = (stage.decision, stage.option, stage.runs, stage.kept_bytes, stage.offloaded_bytes)
        what = (stage.record.module_class, *done)
        groups.setdefault((stage.name if stage.kind == "outside" else "", *what), []).append(stage)
    for stages in groups.values():
        first = stages[0]
        kept_bytes = sum(stage.kept_bytes for stage in stages)
        yield DecisionRow(
            where=names_in_short([stage.name for stage in stages], ""),
            module_class=first.record.module_class if first.kind == "stage" else "",
            decision=first.decision,
            count=len(stages),
            kept_bytes=kept_bytes,
            freed_bytes=max(0, sum(stage.record.held_bytes for stage in stages) - kept_bytes),
            sent_bytes=sum(stage.offloaded_bytes for stage in stages),
            runs=first.runs,
            extra_seconds=sum(stage.extra_seconds for stage in stages),
        )


def op_tables(plan: Plan) -> tuple[OpTable, ...]:
    """The decisions for single ops, and their reasons."""
    groups = [(group, grouped_decisions(group)) for group in groups_of_stages(plan)]
    return tuple(OpTable(f"{group.title}: {group.decision}", tuple(rows)) for group, rows in groups if rows)
