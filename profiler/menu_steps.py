"""The steps that measure menus: stages run under their choices, in real steps, first for bytes and then for seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from profiler.assembly import by_label
from profiler.menus import (
    KEEP,
    Assignment,
    ChoiceCost,
    Costs,
    Group,
    memory_assignments,
    rounds_for,
    selections,
    time_assignments,
)
from profiler.meter import Interval, Meter, memory_meter, time_meter
from profiler.preservation import RandomState
from profiler.probe import StepProbe
from profiler.records import MenuRecord, OptionRecord
from profiler.stage_ops import Choice


class MenuSteps:
    """Runs the steps under one probe."""

    def __init__(
        self,
        probe: StepProbe,
        plain: dict[str, list[Interval]],
        device: torch.device,
        resident_bytes: int,
        randomness: RandomState,
        report: Callable[[str], None],
    ) -> None:
        self._probe = probe
        self._plain = plain
        self._device = device
        self._resident_bytes = resident_bytes
        self._randomness = randomness
        self._report = report

    def measure(self, groups: Sequence[Group]) -> list[MenuRecord]:
        """One menu per group; a group of which a choice cannot be carried out has none and says why."""
        reasons = [""] * len(groups)
        costs = self._costs(groups, reasons)
        if costs is None:  # Some group fails: find out which, each on its own.
            alone = [self._alone(group, reasons, number) for number, group in enumerate(groups)]
            return [_menu(g, c, r) for g, c, r in zip(groups, alone, reasons, strict=True)]
        return [_menu(g, c, r) for g, c, r in zip(groups, costs, reasons, strict=True)]

    def _alone(self, group: Group, reasons: list[str], number: int) -> list[ChoiceCost]:
        reason = [""]
        costs = self._costs([group], reason)
        reasons[number] = reason[0]
        return [] if costs is None else costs[0]

    def _costs(self, groups: Sequence[Group], reasons: list[str]) -> list[list[ChoiceCost]] | None:
        costs = Costs(groups, self._plain)
        try:
            for assignment in memory_assignments(groups):
                self._report("memory, options")
                meter = memory_meter(self._device, self._resident_bytes)
                costs.add_memory(assignment, by_label(self._step(meter, groups, assignment, reasons)))
            for shift in range(rounds_for(len(time_assignments(groups)))):
                for assignment in time_assignments(groups, shift):
                    self._report("time, options")
                    found = self._step(time_meter(self._device), groups, assignment, reasons)
                    costs.add_seconds(assignment, by_label(found))
        except Exception as error:  # noqa: BLE001 - user code runs here; whatever it raises, the choice cannot be used.
            reasons[0] = f"running it with a choice of what to keep fails: {type(error).__name__}: {error}"
            return None
        return costs.finish()

    def _step(
        self, meter: Meter, groups: Sequence[Group], assignment: Assignment, reasons: list[str]
    ) -> list[Interval]:
        self._randomness.restore()
        found = self._probe.step(meter, selections=selections(groups, assignment))
        for k in self._probe.diverged:
            if k in assignment:
                reasons[assignment[k][0]] = "it does not run the same ops in every step"
        return found


def _menu(group: Group, costs: Sequence[ChoiceCost], reason: str) -> MenuRecord:
    if reason or not group.choices:
        return MenuRecord(ops=group.ops, reason=reason)
    options = [_option(c, cost) for c, cost in zip(group.choices, costs[:KEEP], strict=True)]
    return MenuRecord(
        ops=group.ops,
        options=tuple(
            option
            for option, choice in zip(options, group.choices, strict=True)
            if choice.stated or not _beaten(option, options)
        ),
        keep_forward_seconds=costs[KEEP].forward_seconds,
        keep_backward_seconds=costs[KEEP].backward_seconds,
    )


def _option(choice: Choice, cost: ChoiceCost) -> OptionRecord:
    return OptionRecord(
        name=choice.name,
        kept=choice.kept,
        rerun=tuple(sorted(choice.rerun)),
        forward_seconds=cost.forward_seconds,
        backward_seconds=cost.backward_seconds,
        freed_bytes=cost.freed_bytes,
        forward_peak_bytes=cost.forward_peak_bytes,
        backward_peak_bytes=cost.backward_peak_bytes,
    )


def _rank(option: OptionRecord) -> tuple[float, int, int, int]:
    seconds = option.forward_seconds + option.backward_seconds
    return seconds, -option.freed_bytes, option.forward_peak_bytes, option.backward_peak_bytes


def _beaten(option: OptionRecord, options: Sequence[OptionRecord]) -> bool:
    """Whether another option is as good in everything and better in something."""
    mine = _rank(option)
    if option.freed_bytes <= 0:
        return True
    return any(
        other is not option and _rank(other) != mine and all(a <= b for a, b in zip(_rank(other), mine, strict=True))
        for other in options
    )
