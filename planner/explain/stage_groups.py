"""Groups of stages with the same ops and the same decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.plans.plan import Plan, StageDecision
from planner.plans.short_names import names_in_short
from profiler.op_graph import StageOps
from profiler.records import MenuRecord, OptionRecord
from solvers.problem.chain import RUNS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGroup:
    """Stages that have the same ops and the same decision.

    Attributes:
        members: their positions in the plan.
        names: of the stages.
        decision: what happens to them.
        option: number of the option that they go backward with; 0 keeps everything.
        menu: their ops and options; None for what has none.
        runs: forwards of each of them in one step.
    """

    members: tuple[int, ...]
    names: tuple[str, ...]
    decision: StageDecision
    option: int
    menu: MenuRecord | None
    runs: int

    @property
    def chosen(self) -> OptionRecord | None:
        """The option inside the stages, by the numbers of ``ops``; None for keeping everything."""
        return self._flow[1]

    @property
    def ops(self) -> StageOps | None:
        """The stages' ops; None where they are not known."""
        return self._flow[0]

    @property
    def _flow(self) -> tuple[StageOps | None, OptionRecord | None]:
        if self.menu is None:
            return None, None
        return self.menu.flow(self.menu.options[self.option - 1] if self.option else None)

    @property
    def title(self) -> str:
        """Their names in short."""
        return names_in_short(self.names)


def groups_of_stages(plan: Plan) -> tuple[StageGroup, ...]:
    """The groups of a plan's stages, in the order of their first ones; parts outside of stages left out."""
    options = options_of(plan)
    groups: dict[tuple[int, str, int, int], list[int]] = {}
    for k, stage in enumerate(plan.stages):
        if stage.kind == "stage":
            alone = -2 - k if stage.menu < 0 else stage.menu
            groups.setdefault((alone, stage.decision, options.get(k, 0), stage.runs), []).append(k)
    return tuple(_group(plan, members, options) for members in groups.values())


def options_of(plan: Plan) -> dict[int, int]:
    """The option that each kept stage goes backward with."""
    actions = plan.schedule.actions
    return {a.stage: a.option for a in actions if a.kind in RUNS and a.option is not None}


def _group(plan: Plan, members: Sequence[int], options: dict[int, int]) -> StageGroup:
    first = plan.stages[members[0]]
    return StageGroup(
        members=tuple(members),
        names=tuple(plan.stages[k].name for k in members),
        decision=first.decision,
        option=options.get(members[0], 0),
        menu=plan.menus[first.menu] if 0 <= first.menu < len(plan.menus) else None,
        runs=first.runs,
    )
