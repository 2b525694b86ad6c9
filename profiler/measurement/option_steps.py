"""Real steps with stages under a choice of what they keep, run first for the bytes and then for the seconds of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace

from profiler.agreement import first_failure, gathered, made_by_first
from profiler.largest_values import merged_largest
from profiler.measurement.captured_stages import ProposeRuns
from profiler.measurement.meter import Mark, MarkedPhases, Meter, PhasesOfMark, by_mark, time_meter
from profiler.measurement.option_costs import Costs
from profiler.measurement.stage_options import (
    KEEP,
    PROGRAM,
    Assignment,
    ChoiceCost,
    OptionGroup,
    ProposeChoices,
    at_fault,
    families_of,
    memory_assignments,
    rounds_for,
    selections,
    time_assignments,
    unforced,
    without,
)
from profiler.measurement.stage_probe import SelectiveStep, StageProbe
from profiler.op_graph import Choice
from profiler.recomputation.selection import Selection
from profiler.records import MenuRecord, OptionRecord, Phase
from profiler.step_replay import StepRuns, runs_once
from profiler.workload.snapshot import RandomState

# Steps in which what runs again is held against the forward; each without the ops that the one before found.
CHECKS = 3
_DIVERGED = "it does not run the same ops in every step"


class OptionSteps:
    """Runs the steps under one probe, and makes the menus of what they cost.

    Args:
        probe: of the workload's stages.
        plain: the intervals of an unplanned step under the memory meter, by mark.
        memory_meter: makes one for a step.
        randomness: that every step is run from.
        report: is told what runs next.
        timed: unplanned steps under the time meter: what choices are held against.

    Attributes:
        late_phases: the optimizers' part of the step that was run late in training, under the memory meter.
    """

    def __init__(
        self,
        probe: StageProbe,
        plain: PhasesOfMark,
        memory_meter: Callable[[], Meter],
        randomness: RandomState,
        report: Callable[[str], None],
        timed: Sequence[MarkedPhases] = (),
    ) -> None:
        self._probe = probe
        self._plain = plain
        self._device = probe.workload.device
        self._memory_meter = memory_meter
        self._randomness = randomness
        self._report = report
        self._timed = timed
        self.late_phases: list[Phase] = []
        self._diverged: set[int] = set()

    def check(self, groups: Sequence[OptionGroup], propose: ProposeChoices) -> None:
        """Find the ops that do not give the same again, and propose choices without them instead.

        Raises:
            ChoiceError: a person asked for a choice with such an op.
        """
        for _ in range(CHECKS):
            wrong = self._wrong(groups)
            if not wrong:
                return
            for group in groups:
                if group.family in wrong:
                    without(group, wrong[group.family], propose)
        for group in groups:
            if group.family in wrong:
                group.choices = [choice for choice in group.choices if choice.stated]

    def _wrong(self, groups: Sequence[OptionGroup]) -> dict[int, set[int]]:
        """Family -> ops that do not give the same again, when all that its choices run again runs again.

        Choices with an op that a person forces are left out: they are at the person's own risk.
        """
        families = {family.members[0]: family for family in families_of(groups) if unforced(family)}
        reruns = {k: frozenset().union(*(c.rerun for c in unforced(family))) for k, family in families.items()}
        really = {
            k: frozenset().union(*(c.rerun - c.packed for c in unforced(family))) for k, family in families.items()
        }
        if not families:
            return {}
        self._report("check, options")
        self._randomness.restore()
        selected = {k: Selection.of(families[k].ops, rerun, rerun - really[k]) for k, rerun in reruns.items()}
        wrong_ops: dict[int, set[int]] = {}
        raised: RuntimeError | None = None
        try:
            wrong_ops = self._probe.selective_step(time_meter(self._device), selected, check=True).wrong_ops
        except RuntimeError as error:
            # So torch refuses. An op that cannot run again is met once more where choices are measured, and named
            # there. If there was no room for all that is kept and made again at once, choices stay unchecked.
            raised = error
        if first_failure("refused" if raised is not None else "", raised):
            return {}
        on_all = [(k, ops) for of_rank in gathered(wrong_ops) for k, ops in of_rank.items()]
        wrong: dict[int, set[int]] = {}
        for k, ops in on_all:
            wrong.setdefault(families[k].family, set()).update(at_fault(families[k].ops, reruns[k], ops))
        return wrong

    def measure(
        self,
        groups: Sequence[OptionGroup],
        programs: ProposeRuns | None,
        late_in_training: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> list[MenuRecord]:
        """One menu per group; a group of which a choice cannot be carried out has none and says why.

        Args:
            groups: with their choices.
            programs: names the orders of a graph's ops that are worth having; each op once comes first.
            late_in_training: the last step under the memory meter is run in it; its optimizers' part is noted.
        """
        costs = self._costs(groups, late_in_training)
        if isinstance(costs, str) and len(groups) > 1:  # Some group fails: find out which, each on its own.
            self.late_phases = []
            return [menu for group in groups for menu in self.measure([group], programs)]
        if isinstance(costs, str):
            return [MenuRecord(ops=group.ops, reason=group.reason or costs) for group in groups]
        costs = merged_largest(gathered(costs), {"freed_bytes": min})
        self._diverged = set().union(*gathered(self._diverged))
        diverged = {group.family for group in groups if self._diverged & set(group.members)}
        menus = [
            _menu(group, group_costs, _DIVERGED if group.family in diverged else group.reason)
            for group, group_costs in zip(groups, costs, strict=True)
        ]
        orders: dict[int, Sequence[StepRuns]] = {}
        for group in groups:
            if programs is not None and group.captured is not None and group.captured.graph is not None:
                graph = group.captured.graph
                orders[group.family] = orders.get(group.family) or made_by_first(lambda graph=graph: [*programs(graph)])
        return [_as_captured(menu, group, orders.get(group.family)) for menu, group in zip(menus, groups, strict=True)]

    def _costs(
        self, groups: Sequence[OptionGroup], late_in_training: Callable[[], AbstractContextManager[None]]
    ) -> list[list[ChoiceCost]] | str:
        """The costs by group and choice; or why a step failed."""
        costs, raised = self._own_costs(groups, late_in_training)
        return first_failure(costs if isinstance(costs, str) else "", raised) or costs

    def _own_costs(
        self, groups: Sequence[OptionGroup], late_in_training: Callable[[], AbstractContextManager[None]]
    ) -> tuple[list[list[ChoiceCost]] | str, Exception | None]:
        """As this rank has measured them, with the error of a step that failed."""
        costs, families = Costs(groups, self._plain), families_of(groups)
        keeping = {k: (number, KEEP) for number, family in enumerate(families) for k in family.members}
        for step in self._timed:
            costs.add_seconds(keeping, by_mark(step))
        try:
            assignments = memory_assignments(groups)
            for left, assignment in zip(reversed(range(len(assignments))), assignments, strict=True):
                self._report("memory, options")
                with nullcontext() if left else late_in_training():
                    step = by_mark(self._step(self._memory_meter(), groups, assignment).phases)
                costs.add_memory(assignment, step)
                self.late_phases = step.get(Mark("optimizer"), [])
            for shift in range(rounds_for(len(time_assignments(families)))):
                for assignment in time_assignments(families, shift):
                    self._report("time, options")
                    timed = self._step(time_meter(self._device), families, assignment, marks_ops=True)
                    costs.add_seconds(assignment, by_mark(timed.phases), timed.reran)
        except Exception as error:  # noqa: BLE001 - user code runs here; whatever it raises, the choice cannot be used.
            return f"running it with a choice of what to keep fails: {type(error).__name__}: {error}", error
        return costs.finish(), None

    def _step(
        self, meter: Meter, groups: Sequence[OptionGroup], assignment: Assignment, *, marks_ops: bool = False
    ) -> SelectiveStep:
        self._randomness.restore()
        selected = selections(groups, assignment)
        step = self._probe.selective_step(meter, selected, measured=assignment, marks_ops=marks_ops)
        self._diverged |= step.diverged_stages
        return step


def _menu(group: OptionGroup, costs: Sequence[ChoiceCost], reason: str) -> MenuRecord:
    if reason or not group.choices:
        return MenuRecord(ops=group.ops, reason=reason)
    whole = MenuRecord(
        ops=group.ops,
        options=tuple(_option(c, cost) for c, cost in zip(group.choices, costs[:KEEP], strict=True)),
        keep_forward_seconds=costs[KEEP].forward_seconds,
        keep_backward_seconds=costs[KEEP].backward_seconds,
    )
    chosen = zip(whole.options, group.choices, strict=True)
    kept = [o for o, choice in chosen if choice.stated or choice.program or not _beaten(o, whole)]
    return replace(whole, options=tuple(kept))


def _as_captured(menu: MenuRecord, group: OptionGroup, orders: Sequence[StepRuns] | None) -> MenuRecord:
    """The menu with programs in the place of the one that was measured."""
    if group.captured is None:
        return menu
    graph, measured = group.captured.graph, next((o for o in menu.options if o.name == PROGRAM.name), None)
    if graph is None or measured is None or orders is None:
        return replace(menu, opaque=group.captured.opaque or menu.reason)
    once = replace(measured, runs=runs_once(graph))
    options = [once if option is measured else option for option in menu.options]
    menu = replace(
        menu,
        graph=graph,
        options=tuple(options),
        unread=tuple(sorted(group.captured.unread)),
        gradients_held=any(group.captured.once[k].gradients_held for k in group.members),
    )
    return menu.with_programs(orders)


def _option(choice: Choice, cost: ChoiceCost) -> OptionRecord:
    rerun, packed = (tuple(sorted(ops)) for ops in choice.again)
    return OptionRecord(name=choice.name, kept=choice.kept, rerun=rerun, packed=packed, **asdict(cost))


def _rank(option: OptionRecord, menu: MenuRecord) -> tuple[float, int, int, int]:
    seconds = sum(menu.extra_seconds(option))
    return seconds, -option.freed_bytes, option.forward_peak_bytes, option.backward_peak_bytes


def _beaten(option: OptionRecord, menu: MenuRecord) -> bool:
    """Whether another option of the menu is as good in everything and better in something."""
    rank = _rank(option, menu)
    if option.freed_bytes <= 0:
        return True
    others = [_rank(other, menu) for other in menu.options if other is not option]
    return any(other != rank and all(a <= b for a, b in zip(other, rank, strict=True)) for other in others)
