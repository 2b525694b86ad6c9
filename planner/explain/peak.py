"""The peak of a step: what is alive then, and which op made it; as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType

from planner.explain.op_decisions import makers, storages_kept_by
from planner.explain.tables import plain_table
from planner.explain.timeline import Span, Timeline
from planner.plans.plan import Plan
from planner.units import common_path, exact_bytes, format_bytes, in_one_series, names_in_short
from profiler.op_graph import StageOps, kind_of
from profiler.program_replay import random_state_bytes
from profiler.records import MenuRecord, OptionRecord, ResidentBytes
from solvers import Chain, Schedule
from solvers.problem.schedule import RUNS
from solvers.problem.simulator import LiveSet, alive_before, alive_before_each

KEPT = "kept from forward"
MADE_AGAIN = "made again"
RANDOM_STATES = "random states for recomputed ops"
OUTPUTS = "outputs of stages"
LEFT = "left by stages that keep nothing"
CASTS = "casts of parameters"
LOOP = "held by the loop (outputs and losses; with Workload(step=...) also the batch)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakPart:
    """Something that is alive at a peak.

    Attributes:
        what: what it is there for.
        size_bytes: may be negative where the chain counts too much elsewhere.
        op: the op that made it, as torch calls it; empty where that is not known.
        module: the module that called the op; for a gradient the parameter.
        stage: the stage that made it.
        phase: the phase that made it; empty if it is older than the step.
        tensors: how many storages; 0 where that is not known.
    """

    what: str
    size_bytes: int
    op: str = ""
    module: str = ""
    stage: str = ""
    phase: str = ""
    tensors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest moment of a step, explained.

    Attributes:
        source: ``predicted`` or ``measured``.
        peak_bytes: what the parts add up to.
        phase, stage, action: where in the step it stands.
        op: the op that was running, with its module; empty where that is not known.
        seconds: since the step began; None where that is not known.
        parts: what is alive, each thing once.
    """

    source: str
    peak_bytes: int
    phase: str
    stage: str
    action: str
    op: str = ""
    seconds: float | None = None
    parts: tuple[PeakPart, ...]


def predicted_peak(
    chain: Chain,
    schedule: Schedule,
    timeline: Timeline,
    *,
    plan: Plan | None = None,
) -> Peak:
    """Explain the highest moment of a planned step by what the replay holds then.

    Args:
        chain, schedule: what was solved and how.
        timeline: of the same schedule.
        plan: says what is resident, and which ops the stages have; without, only stages are named.
    """
    span = timeline.peak
    if span.action == "optimizer":
        return _explained(span, _in_optimizer(chain, span, plan))
    position = timeline.spans.index(span)
    runs = Counter(a.stage for a in schedule.actions[:position] if a.kind in RUNS)
    alive = alive_before(chain, schedule, position)
    return _explained(span, _during(chain, span, alive, runs, plan))


def predicted_moments(
    chain: Chain, schedule: Schedule, timeline: Timeline, *, plan: Plan | None = None
) -> Iterator[Peak]:
    """Explain the highest moment of every action of a step in turn; arguments as for ``predicted_peak``."""
    runs: Counter[int] = Counter()
    actions = zip(schedule.actions, alive_before_each(chain, schedule), strict=True)
    for span, (action, alive) in zip(timeline.spans, actions, strict=False):
        yield _explained(span, _during(chain, span, alive, runs, plan))
        runs[action.stage] += action.kind in RUNS
    for span in timeline.spans[len(schedule.actions) :]:
        yield _explained(span, _in_optimizer(chain, span, plan))


def _during(chain: Chain, span: Span, alive: LiveSet, runs: Counter[int], plan: Plan | None) -> list[PeakPart]:
    """The parts alive during an action; ``runs`` of stages came before it."""
    parts = _Explained(chain, alive, {k for k, count in runs.items() if count > 1}, plan).parts()
    assert sum(part.size_bytes for part in parts) == span.before_bytes
    return [*parts, _left(span, parts, _meanwhile(span))]


def _in_optimizer(chain: Chain, span: Span, plan: Plan | None) -> list[PeakPart]:
    parts = [*_resident(chain, plan), *_all_gradients(chain)]
    return [*parts, _left(span, parts, "made by the optimizer's step")]


def _explained(span: Span, parts: Sequence[PeakPart]) -> Peak:
    return Peak(
        source="predicted",
        peak_bytes=span.peak_bytes,
        phase=span.phase,
        stage=span.stage,
        action=span.action,
        seconds=(span.start_seconds + span.end_seconds) / 2,
        parts=tuple(part for part in parts if part.size_bytes),
    )


def _left(span: Span, parts: Sequence[PeakPart], what: str) -> PeakPart:
    left = span.peak_bytes - sum(part.size_bytes for part in parts)
    return PeakPart(what=what, size_bytes=left, stage=span.stage, phase=span.phase)


def _meanwhile(span: Span) -> str:
    if span.action == "backward":
        return "backward temporaries"
    return "made as its forward runs" if span.action == "forward" else "made as it runs again"


def _resident(chain: Chain, plan: Plan | None) -> Iterator[PeakPart]:
    """The parts alive before the step; they add up to the chain's number."""
    nothing = ResidentBytes(parameters=0, buffers=0, optimizer=0, inputs=0)
    known = plan.resident if plan is not None and plan.resident is not None else nothing
    beside_bytes = chain.resident_bytes - known.total
    # Gradients that the step clears before its first stage are not among the chain's.
    gradient_bytes = max(0, known.gradients + min(0, beside_bytes))
    named = {
        "parameters": known.parameters,
        "other parameters": known.other_parameters,
        "optimizer states": known.optimizer,
        "loss scale": known.scaler,
        "buffers": known.buffers,
        "batch": known.inputs,
        "gradients from before": gradient_bytes,
        LOOP: known.loop,
    }
    for what, size in named.items():
        yield PeakPart(what=what, size_bytes=size)
    yield PeakPart(
        what="resident" if not known.total else "other resident", size_bytes=chain.resident_bytes - sum(named.values())
    )


def _all_gradients(chain: Chain) -> list[PeakPart]:
    return [_gradients(chain, k) for k in range(len(chain.stages))]


def _gradients(chain: Chain, k: int) -> PeakPart:
    stage = chain.stages[k]
    return PeakPart(
        what="gradients of parameters", size_bytes=stage.parameter_gradient_bytes, stage=stage.name, phase="backward"
    )


class _Explained:
    """The parts alive as an action begins; stages ``again`` have run more than once before."""

    def __init__(self, chain: Chain, alive: LiveSet, again: set[int], plan: Plan | None) -> None:
        self._stages = chain.stages
        self._chain = chain
        self._plan = plan
        self._alive = alive
        self._again = again
        self._outputs = {k: chain.stages[k].boundary_bytes for k in self._alive.boundaries}
        self._away: Counter[int] = Counter()  # bytes of kept stages that are in host memory
        self._gone: dict[int, set[int]] = {}  # their storages
        for k, unit in self._alive.away:
            self._take_away(k, unit)

    def _take_away(self, k: int, unit: int) -> None:
        option, menu = self._alive.kept.get(k), self._menu(k)
        if option is None:
            self._outputs[k - 1] -= self._stages[k].offload_units[unit]
            return
        number = -1 if self._plan is None else self._plan.stages[k].offload_units[unit]
        if menu is not None and number >= 0 and menu.ops.storages[number].op < 0:
            self._outputs[k - 1] -= option.offload_units[unit]
        else:
            self._away[k] += option.offload_units[unit]
            self._gone.setdefault(k, set()).add(number)

    def parts(self) -> list[PeakPart]:
        alive = self._alive
        parts = [*_resident(self._chain, self._plan), *(part for k in alive.kept for part in self._kept(k))]
        parts += [self._output(k, size) for k, size in self._outputs.items()]
        parts += [self._of(LEFT, k, self._stages[k].residue_bytes) for k in alive.residues]
        parts += [self._shared(number) for number in alive.shared]
        parts += [_gradients(self._chain, k) for k in alive.gradients]
        if alive.incoming is not None:
            size = self._stages[alive.incoming].gradient_bytes
            parts.append(self._of("gradients of activations", alive.incoming, size, "backward"))
        return parts

    def _of(self, what: str, k: int, size_bytes: int, phase: str = "forward") -> PeakPart:
        return PeakPart(what=what, size_bytes=size_bytes, stage=self._stages[k].name, phase=phase)

    def _kept(self, k: int) -> Iterator[PeakPart]:
        """The storages that a stage keeps; the difference from the chain's number comes last."""
        option, menu = self._alive.kept[k], self._menu(k)
        left = option.kept_bytes + (0 if k in self._alive.boundaries else option.kept_output_bytes) - self._away[k]
        number = next(i for i, other in enumerate(self._stages[k].options) if other is option)
        for part in () if menu is None else self._stored(k, menu, number, left):
            left -= part.size_bytes
            yield part
        if left < 0:  # The stage lets go of its input, which its replay counts as alive.
            given = min(-left, self._outputs.get(k - 1, 0))
            self._outputs[k - 1] = self._outputs.get(k - 1, 0) - given
            left += given
        yield self._of(KEPT if menu is None else "kept, not told apart", k, left)

    def _stored(self, k: int, menu: MenuRecord, option: int, left: int) -> Iterator[PeakPart]:
        """The storages that a stage keeps, and those of its output that are held for longer than the next stage does.

        What it returns is mostly counted as its output, or as held by several
        stages: it is named here as far as there are bytes left for it.
        """
        kept = MADE_AGAIN if k in self._again else KEPT
        of_menu = menu.options[option - 1] if option else None
        if of_menu is not None and menu.graph is not None:
            yield self._of(RANDOM_STATES, k, random_state_bytes(menu.graph, of_menu.runs))
        ops, chosen = menu.flow(of_menu)
        for what, storages in ((kept, _kept_storages(ops, chosen)), (OUTPUTS, _outputs_not_kept(ops, chosen))):
            for number in storages:
                entry = ops.storages[number]
                if number in self._gone.get(k, ()):
                    continue
                if not entry.returned or entry.size_bytes <= left:
                    left -= entry.size_bytes
                    yield self._made(what, k, ops, number)

    def _output(self, k: int, size_bytes: int) -> PeakPart:
        menu = self._menu(k)
        made = [] if menu is None else [n for n, s in enumerate(menu.ops.storages) if s.returned and s.op >= 0]
        if menu is None or len(made) != 1:
            return self._of(OUTPUTS, k, size_bytes)
        return replace(self._made(OUTPUTS, k, menu.ops, made[0]), size_bytes=size_bytes)

    def _made(self, what: str, k: int, ops: StageOps, storage: int) -> PeakPart:
        entry = ops.storages[storage]
        phase = "backward" if what == MADE_AGAIN else "forward"
        part = replace(self._of(what, k, entry.size_bytes, phase), tensors=1)
        if entry.op < 0:
            return replace(part, what="inputs kept for ops that run again")
        maker = ops.ops[makers(ops)[storage]]
        return replace(part, op=maker.op, module=maker.module)

    def _shared(self, number: int) -> PeakPart:
        tensor = self._chain.shared[number]
        if not tensor.readers and not tensor.linked_readers:
            return self._of(CASTS, tensor.born, tensor.size_bytes)
        return replace(self._output(tensor.born, tensor.size_bytes), what="held by several stages", tensors=1)

    def _menu(self, k: int) -> MenuRecord | None:
        menu = -1 if self._plan is None else self._plan.stages[k].menu
        return None if self._plan is None or not 0 <= menu < len(self._plan.menus) else self._plan.menus[menu]


def _kept_storages(ops: StageOps, option: OptionRecord | None) -> list[int]:
    """Storages that an option keeps itself, those that the stage returns last."""
    storages = ops.storages
    if option is not None:
        chosen = storages_kept_by(ops, option)
        kept = [n for n in chosen if storages[n].op >= 0 or not storages[n].dies_after_stage]
    else:
        kept = [
            n for n, storage in enumerate(storages) if storage.saved and storage.op >= 0 and not storage.always_live
        ]
    return sorted(kept, key=lambda n: storages[n].returned)


def _outputs_not_kept(ops: StageOps, option: OptionRecord | None) -> list[int]:
    """Storages that the stage returns and the option does not keep."""
    kept = set(_kept_storages(ops, option))
    return [n for n, s in enumerate(ops.storages) if s.returned and s.op >= 0 and n not in kept]


COLUMNS = ("series", "what", "op", "module", "stage", "phase", "tensors", "bytes")
ROWS_SHOWN = 12
_EVERY_STAGE = ("gradients of parameters", "gradients of activations", "left by stages that keep nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """Parts that are alike: the same reason, the same kind of op, stages of the same class."""

    what: str
    op: str
    where: str
    tensors: int
    size_bytes: int


def peak_rows(peak: Peak, plan: Plan | None = None) -> list[PeakRow]:
    """The parts of a peak, alike ones together, largest first.

    Args:
        peak: explained.
        plan: says of which class the stages are, and in which order they run.
    """
    stages = () if plan is None else plan.stages
    classes = {stage.name: stage.record.module_class for stage in stages if stage.kind == "stage"}
    order = {stage.name: k for k, stage in enumerate(stages)}
    groups: dict[tuple[str, str, str, str], list[PeakPart]] = {}
    for part in sorted(peak.parts, key=lambda part: order.get(part.stage, 0)):
        module_class = "" if part.what in _EVERY_STAGE or plan is None else classes.get(part.stage, part.stage)
        groups.setdefault((part.what, _kind(part), part.phase, module_class), []).append(part)
    path = path_of(plan)
    return sorted((_row(key[1], parts, path, key[3]) for key, parts in groups.items()), key=lambda row: -row.size_bytes)


def path_of(plan: Plan | None) -> str:
    """The modules around all stages: rows leave them out of the stages' names."""
    return "" if plan is None else common_path([stage.name for stage in plan.stages if stage.kind == "stage"])


def _kind(part: PeakPart) -> str:
    return "" if part.what in _EVERY_STAGE else kind_of(part.op)


def _row(op: str, parts: Sequence[PeakPart], path: str, module_class: str) -> PeakRow:
    stages = list(dict.fromkeys(part.stage for part in parts if part.stage))
    where = names_in_short(stages).replace(path, "") if stages else ""
    if module_class and len(stages) > 1 and not in_one_series(stages):
        where = f"{len(stages)} x {module_class}"
    modules = {part.module for part in parts}
    inside = f" ({modules.pop()})" if op and len(modules) == 1 and "" not in modules else ""
    return PeakRow(
        what=parts[0].what,
        op=op + inside,
        where=where,
        tensors=sum(part.tensors for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
    )


def alive_report(peak: Peak, plan: Plan | None = None) -> RenderableType:
    """Table of the parts alive at the peak, largest first, in ``ROWS_SHOWN`` rows."""
    rows = peak_rows(peak, plan)
    shown = rows[:ROWS_SHOWN]
    title = peak_title(peak).replace(path_of(plan), "") if path_of(plan) else peak_title(peak)
    table = plain_table(title, ["alive", "made by", "in"], ["tensors", "size", "share"])
    for row in shown:
        tensors = str(row.tensors) if row.tensors else "-"
        share = f"{row.size_bytes / peak.peak_bytes:.0%}" if peak.peak_bytes else "-"
        cells = (row.what, row.op or "-", row.where or "-")
        table.add_row(*cells, tensors, format_bytes(row.size_bytes), share)
    rest = [row.size_bytes for row in rows[len(shown) :]]
    smaller, twice = [size for size in rest if size >= 0], [size for size in rest if size < 0]
    notes = [f"and {len(smaller)} smaller ones: {format_bytes(sum(smaller))}"] if smaller else []
    notes += [f"less what is counted twice above: {format_bytes(-sum(twice))}"] if twice else []
    notes += [f"names of stages without {path_of(plan)!r}"] if path_of(plan) else []
    return Group(table, *(["; ".join(notes)] if notes else []))


def peak_title(peak: Peak) -> str:
    """One line: how much, where in the step, and at which op."""
    at = f", at {peak.op}" if peak.op else ""
    return f"Peak, {peak.source}: {exact_bytes(peak.peak_bytes)} {moment_in_words(peak)}{at}"


def moment_in_words(peak: Peak) -> str:
    """Where in the step a peak is."""
    apart = {"optimizer": "in the optimizer's step", "loss": "between forward and backward, at the loss"}
    return apart.get(peak.action, f"in the {peak.action} of {stage_in_words(peak.stage)}")


def stage_in_words(stage: str) -> str:
    """The name of a stage, as a sentence has it.

    >>> stage_in_words("h.0"), stage_in_words("between drop and h.0")
    ('h.0', 'what runs between drop and h.0')
    """
    name = stage.removeprefix("outside, ")  # as files of older releases have it
    return f"what runs {name}" if name.startswith(("before ", "between ", "after ")) else name


def peak_parts(peaks: Iterable[Peak]) -> list[dict[str, str | int]]:
    """Every part of every peak, largest first.

    Keys: ``series`` (``predicted`` or ``measured``), ``what``, ``op`` (that made it), ``module`` (relative to the
    stage), ``stage``, ``phase`` (in which it was made), ``tensors`` (0 where not known), ``bytes``. The bytes of a
    series add up to its peak.
    """
    rows = [
        (peak.source, p.what, p.op, p.module, p.stage, p.phase, p.tensors, p.size_bytes)
        for peak in peaks
        for p in sorted(peak.parts, key=lambda part: -part.size_bytes)
    ]
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]
