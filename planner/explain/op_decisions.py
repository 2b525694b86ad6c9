"""Which ops of a group of stages are kept, recomputed, or neither, and why in bytes and seconds; as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from planner.explain.tables import PlainTable, plain_table
from planner.plans.plan import Plan, StageDecision
from planner.units import common_path, counted, format_bytes, format_seconds, names_in_short
from profiler.op_graph import ChoiceError, StageOps, is_allocation
from profiler.records import MenuRecord, OptionRecord
from solvers.problem.schedule import RUNS

OpOutcome = Literal["recomputed", "kept", "not needed", "view"]
_SMALL = 10  # what an op frees is no reason to run it again where an op that reads it frees so many times more


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDecision:
    """The decision for one op, or for several that are alike.

    Attributes:
        ordinals: their positions in the stage.
        op: their kind.
        module: that called them, relative to the stage.
        outcome: ``recomputed``: they run again in backward; ``kept``: what they make stays until backward;
            ``not needed``: backward does not need it; ``view``: they make nothing of their own.
        size_bytes: kept: what stays; recomputed: what need not stay.
        seconds: of running them once.
        why: bytes against seconds, or what needs them.
    """

    ordinals: tuple[int, ...]
    op: str
    module: str
    outcome: OpOutcome
    size_bytes: int
    seconds: float
    why: str


def decisions_of_ops(group: StageGroup) -> list[OpDecision]:
    """Every op of a group of stages on its own, in order; none where the ops are not known."""
    if (ops := group.ops) is None:
        return []
    decided = _DecidedOps(group, ops)
    return [decided.decision_of([ordinal]) for ordinal in range(len(ops.ops))]


def grouped_decisions(group: StageGroup) -> list[OpDecision]:
    """Ops of the same kind, module and outcome together; views left out; first what runs again, largest first."""
    if (ops := group.ops) is None:
        return []
    decided = _DecidedOps(group, ops)
    alike: dict[tuple[OpOutcome, str, str], list[int]] = {}
    for ordinal, op in enumerate(ops.ops):
        alike.setdefault((decided.outcome(ordinal), op.kind, op.module), []).append(ordinal)
    order: tuple[OpOutcome, ...] = ("recomputed", "kept", "not needed")
    decisions = [decided.decision_of(ordinals) for (outcome, *_), ordinals in alike.items() if outcome in order]
    return sorted(decisions, key=lambda each: (order.index(each.outcome), -each.size_bytes, -each.seconds))


def makers(ops: StageOps) -> dict[int, int]:
    """The op to name for each storage that is made in a stage: where one only allocates it, the one that fills it."""
    maker_of = {number: ordinal for ordinal, op in enumerate(ops.ops) for number in op.allocates}
    for ordinal, op in enumerate(ops.ops):
        for number in op.writes:
            if number in maker_of and is_allocation(ops.ops[maker_of[number]].op):
                maker_of[number] = ordinal
    return maker_of


def storages_kept_by(ops: StageOps, option: OptionRecord) -> list[int]:
    """Storages that really stay until backward under an option.

    What an op that runs again writes last is made again, also where it need
    not have been dropped; and what nobody reads in backward goes.
    """
    writers, read, again = ops.writers(), ops.read_by(option.rerun), set(option.rerun)
    kept = [n for n in option.kept if ops.storages[n].saved or n in read]
    return [n for n in kept if writers.get((n, ops.storages[n].versions), -1) not in again]


def always_live_tensors(group: StageGroup) -> tuple[int, int]:
    """Tensors from outside of the stage that its backward reads and that are alive anyway: how many, and bytes."""
    storages = group.menu.ops.storages if group.menu is not None else ()
    sizes = [storage.size_bytes for storage in storages if storage.always_live and storage.saved]
    return len(sizes), sum(sizes)


class _DecidedOps:
    """The ops of a group of stages under its decision."""

    def __init__(self, group: StageGroup, ops: StageOps) -> None:
        self._ops = ops
        self._storages = ops.storages
        self._made: dict[int, list[int]] = {ordinal: [] for ordinal in range(len(ops.ops))}
        for number, ordinal in makers(ops).items():
            self._made[ordinal].append(number)
        self._readers = _readers(ops)
        self._values = _values(ops)
        saved = [n for n, storage in enumerate(self._storages) if storage.saved and storage.op >= 0]
        self._kept: set[int] = set()
        if group.decision in ("recompute", "segment"):
            self._rerun = frozenset(range(self._end_of(saved)))
        elif (chosen := group.chosen) is None:
            self._rerun = frozenset[int]()
            self._kept = set(saved)
        else:
            self._rerun = frozenset(chosen.rerun)
            self._kept = set(storages_kept_by(ops, chosen))

    def _end_of(self, saved: Sequence[int]) -> int:
        """A stage that runs again as a whole stops behind the op that makes its last saved tensor."""
        writers = self._ops.writers()
        return 1 + max((writers[n, self._storages[n].versions] for n in saved), default=-1)

    def outcome(self, ordinal: int) -> OpOutcome:
        """The decision for one op."""
        op = self._ops.ops[ordinal]
        touched = {*self._made[ordinal], *op.writes}
        if not touched:
            return "view"
        if ordinal in self._rerun:
            return "recomputed"
        return "kept" if self._kept & touched else "not needed"

    def decision_of(self, ordinals: Sequence[int]) -> OpDecision:
        """The decision on ops that have the same outcome."""
        first = self._ops.ops[ordinals[0]]
        outcome = self.outcome(ordinals[0])
        made = {n for ordinal in ordinals for n in self._made[ordinal]}
        if outcome == "recomputed":
            counted = {n for n in made if self._storages[n].saved}
        else:
            counted = made & self._kept
        size = sum(self._storages[n].size_bytes for n in counted)
        seconds = sum(self._ops.ops[ordinal].seconds for ordinal in ordinals)
        return OpDecision(
            ordinals=tuple(ordinals),
            op=first.kind,
            module=first.module,
            outcome=outcome,
            size_bytes=size,
            seconds=seconds,
            why=self._why(ordinals, outcome, counted, size, seconds),
        )

    def _why(self, ordinals: Sequence[int], outcome: OpOutcome, counted: set[int], size: int, seconds: float) -> str:
        if outcome == "recomputed":
            return self._why_again(ordinals, size, seconds)
        if outcome == "kept":
            return self._why_kept(ordinals, counted, size)
        made = [self._storages[n] for ordinal in ordinals for n in self._made[ordinal]]
        return "the stage's output" if any(storage.returned for storage in made) else ""

    def _why_again(self, ordinals: Sequence[int], size: int, seconds: float) -> str:
        """The gain of recomputing: by its bytes, or because an op with a larger gain reads the result."""
        reader = next(self._readers_again(ordinals), None)
        if size and (reader is None or _SMALL * size >= self._dropped_bytes(reader)):
            return _rate(seconds, size)
        if reader is not None:
            return f"runs again to reach op {reader} ({self._ops.ops[reader].kind})"
        writes = [n for ordinal in ordinals for n in self._ops.ops[ordinal].writes]
        return f"changes again what op {self._storages[writes[0]].op} makes" if writes else "runs again with the stage"

    def _readers_again(self, ordinals: Sequence[int]) -> Iterator[int]:
        """Ops that run again and read what these make, those worth most first."""
        values = [value for ordinal in ordinals for value in self._values[ordinal]]
        readers = {k for value in values for k in self._readers.get(value, ()) if k in self._rerun} - {*ordinals}
        return iter(sorted(readers, key=lambda k: (-self._dropped_bytes(k), k)))

    def _dropped_bytes(self, ordinal: int) -> int:
        """Bytes of what an op makes that are saved and not kept."""
        made = [self._storages[n] for n in self._made[ordinal] if n not in self._kept]
        return sum(storage.size_bytes for storage in made if storage.saved)

    def _why_kept(self, ordinals: Sequence[int], kept: set[int], size: int) -> str:
        if not kept:
            return "changes in place what is kept"
        needed = sorted(n for n in kept if not self._storages[n].saved)
        if needed and len(needed) == len(kept):
            readers = [k for k in sorted(self._rerun) if any(n in needed for n, _ in self._ops.ops[k].reads)]
            reader = f"op {readers[0]} ({self._ops.ops[readers[0]].kind})" if readers else "an op"
            return f"{reader}, which runs again, reads it"
        try:
            again = self._ops.rerun(self._kept - kept, self._rerun) - self._rerun
        except ChoiceError:
            return f"must not run again: {self._why_fixed(ordinals, kept)}"
        seconds = sum(self._ops.ops[k].seconds for k in again)
        more = len(again) - len(ordinals)
        others = f", with {more} op{'s' if more > 1 else ''} before it" if more > 0 else ""
        return f"{_rate(seconds, size)} to make again{others}"

    def _why_fixed(self, ordinals: Sequence[int], dropped: set[int]) -> str:
        """Why what these make cannot be made again: the reason of theirs, or of an op before them."""
        writers, waiting, seen = self._ops.writers(), list(ordinals), set(ordinals)
        while waiting:
            ordinal = waiting.pop()
            op = self._ops.ops[ordinal]
            if op.not_rerunnable_reason:
                return (
                    op.not_rerunnable_reason
                    if ordinal in ordinals
                    else f"op {ordinal} ({op.kind}) before it must not, {op.not_rerunnable_reason}"
                )
            for number, version in op.reads:
                stays = number in self._kept - dropped and version == self._storages[number].versions
                writer = writers.get((number, version), -1)
                if not stays and writer >= 0 and writer not in seen:
                    seen.add(writer)
                    waiting.append(writer)
        return "an input that it needs is gone by then"


def _rate(seconds: float, size_bytes: int) -> str:
    return f"{format_seconds(seconds * 2**20 / size_bytes)} a MiB"


def _readers(ops: StageOps) -> dict[tuple[int, int], list[int]]:
    """Per value, the ops that read it, in order."""
    readers: dict[tuple[int, int], list[int]] = {}
    for ordinal, op in enumerate(ops.ops):
        for value in op.reads:
            readers.setdefault(value, []).append(ordinal)
    return readers


def _values(ops: StageOps) -> dict[int, list[tuple[int, int]]]:
    """Per op, the values that it makes: of new storages the first version, of changed ones a later one."""
    values: dict[int, list[tuple[int, int]]] = {ordinal: [] for ordinal in range(len(ops.ops))}
    for value, ordinal in ops.writers().items():
        values[ordinal].append(value)
    return values


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


ROWS_SHOWN = 5  # each of what is recomputed and of what is kept
TABLES_SHOWN = 3  # of the groups that free most; the others in a line
_COLOURS: dict[OpOutcome, str] = {
    "recomputed": "yellow",
    "kept": "green",
    "not needed": "dim",
    "view": "dim",
}


def plan_ops_report(plan: Plan, *, every_op: bool = False) -> RenderableType:
    """Every group of a plan's stages with what happens to its ops.

    Args:
        plan: with the menus of its profile; of stages without one only the decision is said.
        every_op: all ops of all groups one by one; else of groups in which
            some ops run again, the largest ones, alike ones together.
    """
    groups = [group for group in groups_of_stages(plan) if every_op or group.decision == "selective"]
    ranked = sorted(groups, key=lambda group: -(group.chosen.freed_bytes * len(group.members) if group.chosen else 0))
    with_table = {group.members for group in ranked[:TABLES_SHOWN]}
    parts: list[RenderableType] = [Text("Ops, per kind of stage", style="bold")]
    for group in groups:
        parts += _group_report(plan, group, every_op, table=group.members in with_table)
    return Group(*parts)


def _group_report(plan: Plan, group: StageGroup, every_op: bool, *, table: bool) -> Iterator[RenderableType]:
    path = common_path([stage.name for stage in plan.stages if stage.kind == "stage"])
    title = group.title.replace(path, "") if path else group.title
    yield Text.assemble("\n", (title, "bold"), f", {group.decision}: {_stage_decision(plan, group)}")
    if group.menu is None:
        return
    if every_op:
        yield _table([(str(op.ordinals[0]), op) for op in decisions_of_ops(group)], "op")
        yield _always_live(group)
    elif group.decision == "selective" and table:
        yield from _largest(group)
    elif group.decision == "selective":
        short = [_in_short(ops) for ops in grouped_decisions(group) if ops.outcome == "recomputed"]
        if short:
            yield f"recomputed: {', '.join(short)}"


def _stage_decision(plan: Plan, group: StageGroup) -> str:
    """Bytes and seconds of a group of stages, per stage."""
    stage = plan.stages[group.members[0]]
    per_stage = " each" if len(group.members) > 1 else ""
    cost = f"costs {format_seconds(stage.extra_seconds) if stage.extra_seconds else 'no time to speak of'}{per_stage}"
    saved_bytes = group.menu.ops.saved_bytes if group.menu is not None else 0
    if group.decision == "keep":
        return f"{format_bytes(stage.kept_bytes)}{per_stage}" if stage.kept_bytes else "nothing of its own"
    if group.decision == "selective" and group.chosen is not None and group.menu is not None:
        freed = f"frees {format_bytes(group.chosen.freed_bytes)} of {format_bytes(saved_bytes)}"
        count = len(group.ops.ops) if group.ops is not None else 0
        return f"{len(group.chosen.rerun)} of {count} ops run again: {freed}, {cost}"
    freed = f"frees {format_bytes(saved_bytes)}, " if saved_bytes else ""
    inside = f"; from its last run on all but {stage.option}" if stage.option else ""
    return f"runs {group.runs} times: {freed}{cost}{inside}"


def _largest(group: StageGroup) -> Iterator[RenderableType]:
    decisions = grouped_decisions(group)
    shown = [
        *[ops for ops in decisions if ops.outcome == "recomputed"][:ROWS_SHOWN],
        *[ops for ops in decisions if ops.outcome == "kept" and ops.size_bytes][:ROWS_SHOWN],
    ]
    yield _table([(_count_of(ops), ops) for ops in shown], "")
    rest = [ops for ops in decisions if ops not in shown]
    outcomes = dict.fromkeys(ops.outcome for ops in rest)
    if rest:
        yield f"beside these: {', '.join(_together([ops for ops in rest if ops.outcome == o], o) for o in outcomes)}"
    yield _always_live(group)


def _always_live(group: StageGroup) -> str:
    count, size_bytes = always_live_tensors(group)
    return f"held anyway: {counted(count, 'tensor')} from outside (inputs, parameters), {format_bytes(size_bytes)}"


def _in_short(ops: OpDecision) -> str:
    size = f" {format_bytes(ops.size_bytes)}" if ops.size_bytes else ""
    return f"{_count_of(ops)} {ops.op}{size}".strip()


def _count_of(ops: OpDecision) -> str:
    return f"{len(ops.ordinals)} x" if len(ops.ordinals) > 1 else ""


def _together(decisions: Sequence[OpDecision], outcome: str) -> str:
    """Ops of one outcome in a few words."""
    count = counted(sum(len(ops.ordinals) for ops in decisions), "op")
    size_bytes, seconds = sum(ops.size_bytes for ops in decisions), sum(ops.seconds for ops in decisions)
    return f"{count} {outcome} ({f'{format_bytes(size_bytes)}, ' if size_bytes else ''}{format_seconds(seconds)})"


def _table(rows: Sequence[tuple[str, OpDecision]], first: str) -> PlainTable:
    table = plain_table("", [first, "op", "module", "decision", "why"], ["bytes", "time"])
    for number, ops in rows:
        size = format_bytes(ops.size_bytes) if ops.size_bytes else "-"
        decision = Text(ops.outcome, style=_COLOURS[ops.outcome])
        cells = (number, ops.op, ops.module, decision, ops.why)
        table.add_row(*cells, size, format_seconds(ops.seconds))
    return table
