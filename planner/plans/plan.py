"""The plan: a schedule bound to a model's stage names, with what it predicts; saved as versioned JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from planner.pictures import AliveDuring, html_table
from planner.plans.offload_request import link_document, link_from
from planner.plans.plan_claims import FORMAT, VERSION, PlanClaims
from planner.plans.short_names import names_in_short
from planner.units import counted, format_bytes, format_seconds
from profiler.json_files import check_positions, from_plain, read_document, to_plain
from profiler.records import WHOLE_MODEL, LeftOutRecord, MenuRecord, PiecesRecord, ResidentBytes, StageRecord
from solvers.problem.chain import Chain
from solvers.problem.schedule import RUNS, TRANSFERS, Action, Schedule
from solvers.problem.simulator import replay

StageDecision = Literal["keep", "selective", "offload", "recompute", "segment"]
_DONE: dict[StageDecision, str] = {
    "keep": "kept",
    "selective": "recomputed in part",
    "offload": "sent to host memory",
    "recompute": "recomputed",
    "segment": "recomputed in segments",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage of a plan: what happens to it, and what the applier has to know to do it.

    Attributes:
        record: the stage in the profile; with it a plan can be solved again by itself.
        decision: ``keep``; ``offload`` (kept, some of it in host memory meanwhile);
            ``selective`` (some of its ops run again, see ``option``);
            ``recompute`` (its input is kept, it is run again whole);
            ``segment`` (its input is dropped too and comes from the stage before).
            Parts outside of stages are always kept.
        kept_bytes: bytes kept from its forward to its backward.
        runs: forwards of it in one step, the first included.
        extra_seconds: predicted seconds that the plan adds to it.
        extra_ops: aten ops that the plan adds to it.
        option: what runs again inside a selective stage, in words.
        offload_units: what may be sent to host memory of what it keeps: storages, by their numbers in its ops.
        input_offload_units: what may be sent while it waits to run again: input tensors of each unit, by number.
        offloaded_bytes: what it sends in one step.
        keeps_gathered: whether its unit of ``fully_shard`` keeps its parameters gathered from forward to backward.
    """

    record: StageRecord
    decision: StageDecision = "keep"
    kept_bytes: int = 0
    runs: int = 1
    extra_seconds: float = 0.0
    extra_ops: int = 0
    option: str = ""
    offload_units: tuple[int, ...] = ()
    input_offload_units: tuple[tuple[int, ...], ...] = ()
    offloaded_bytes: int = 0
    keeps_gathered: bool = False

    @property
    def name(self) -> str:
        """As in the profile."""
        return self.record.name

    @property
    def kind(self) -> Literal["stage", "outside"]:
        """As in the profile."""
        return self.record.kind

    @property
    def menu(self) -> int:
        """Number of its ops and programs in ``Plan.menus``; -1 for what has none."""
        return self.record.menu


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(PlanClaims):
    """A schedule with names and predictions. Bytes and seconds are of one whole training step.

    Attributes:
        profile_fingerprint: of the profile it was made from.
        stages, schedule: what happens to which stage, and when.
        menus: per kind of stage its ops and options; option k of the schedule, from 1, is ``options[k - 1]``.
        chain: the problem that the schedule solves; None in files of older releases.
        resident: what ``resident_bytes`` is made of; None in files of older releases.
        unseen: as in the profile.
        unsteady, batch_sized, forward_nodes: as in the profile.
        left_out: blocks that keep much and cannot run again, whatever the budget.
        in_flight: as in the profile.
        frugal: as in the profile: unplanned peak and seconds were computed, and never measured as a whole.
        saved_seconds: of what the unplanned step does and this plan's does not: gathers of parameters, and the head all
            at once; below zero where pieces take longer.
        pieces: what runs in pieces: the head together with its loss, and modules; None where nothing does.
    """

    profile_fingerprint: str
    stages: tuple[PlannedStage, ...]
    schedule: Schedule
    menus: tuple[MenuRecord, ...] = ()
    chain: Chain | None = None
    resident: ResidentBytes | None = None
    unseen: tuple[str, ...] = ()
    unsteady: tuple[str, ...] = ()
    batch_sized: tuple[str, ...] = ()
    forward_nodes: int = 0
    left_out: tuple[LeftOutRecord, ...] = ()
    frugal: bool = False
    in_flight: tuple[tuple[int, int], ...] = ()
    saved_seconds: float = 0.0
    pieces: PiecesRecord | None = None

    @property
    def other_bits(self) -> tuple[str, ...]:
        """Names of the stages that run as programs which round otherwise than their own code."""
        as_programs = {action.stage for action in self.schedule.actions if action.kind in RUNS and action.option}
        menus = {k: self.menus[self.stages[k].menu] for k in sorted(as_programs) if self.stages[k].menu >= 0}
        return tuple(self.stages[k].name for k, menu in menus.items() if menu.other_bits)

    def _what_is_done(self) -> list[str]:
        done = self._by_decision()
        pieces = [] if self.pieces is None else pieces_in_words(self.pieces)
        # With zero-argument super a dataclass with slots would ask the class before it had them.
        return [
            *PlanClaims._what_is_done(self),
            *pieces,
            *(f"{what}: {names_in_short([stage.name for stage in stages])}" for what, stages in done.items()),
        ]

    def _done_in_short(self) -> str:
        decisions: Counter[StageDecision] = Counter(stage.decision for stage in self.stages if stage.kind == "stage")
        counts = [f"{number} {_DONE[decision]}" for decision, number in decisions.items()]
        pieces = f"{'; '.join(_in_pieces(self.pieces))}; " if self.pieces else ""
        of_stages = f"of {counted(decisions.total(), 'stage')} {', '.join(counts)}"
        return f"{of_stages}; {pieces}{PlanClaims._done_in_short(self)}"

    def _by_decision(self) -> dict[str, list[PlannedStage]]:
        """Stages with what happens to them, in words; parts outside of stages left out."""
        done: dict[str, list[PlannedStage]] = {}
        for stage in self.stages:
            if stage.kind == "stage":
                what = f"{stage.decision}, {stage.option}" if stage.decision == "selective" else stage.decision
                done.setdefault(what, []).append(stage)
        return done

    def _decision_table(self) -> str:
        rows = [
            (
                names_in_short([stage.name for stage in stages]),
                what,
                format_bytes(sum(stage.kept_bytes for stage in stages)),
                format_seconds(sum(stage.extra_seconds for stage in stages)),
            )
            for what, stages in self._by_decision().items()
        ]
        return html_table(("stages", "decision", "kept until backward", "extra time"), rows)

    def _alive(self) -> Iterator[AliveDuring]:
        for moment in replay(chain_in(self), self.schedule, self.link).timeline:
            yield AliveDuring(moment.seconds, moment.before_bytes, moment.peak_bytes, moment.after_bytes)

    def seconds_outside(self, chain: Chain) -> float:
        """Seconds of the step that are in none of the stages of its chain: the optimizer's."""
        return self.unplanned_seconds - self.saved_seconds - chain.unplanned_seconds

    def offload_units_of(self, stage: int, option: int | None) -> tuple[tuple[int, ...], ...]:
        """Of each offload unit of a stage its storages if it is kept, its input tensors if dropped; by number."""
        planned = self.stages[stage]
        return planned.input_offload_units if option is None else tuple((number,) for number in planned.offload_units)

    def _decided(self) -> Any:
        records = [stage.record for stage in self.stages]
        stages = [[r.name, r.kind, r.module_class, r.links, r.input_shapes, r.parameter_shapes] for r in records]
        units = [[stage.offload_units, stage.input_offload_units] for stage in self.stages]
        gathered = [k for k, stage in enumerate(self.stages) if stage.keeps_gathered]
        return [
            stages,
            units,
            *([gathered] if gathered else []),
            *([[self.pieces.head, self.pieces.rows_at_once, to_plain(self.pieces.modules)]] if self.pieces else []),
            [[action.kind, action.stage, self._runs_again(action)] for action in self.schedule.actions],
        ]

    def _runs_again(self, action: Action) -> Any:
        """Of a run of a program its ops in order; else the action's number."""
        if not action.option or action.kind in TRANSFERS:
            return action.option
        menu = self.menus[self.stages[action.stage].menu]
        assert menu.graph is not None
        runs = menu.options[action.option - 1].runs
        return [[menu.graph.ops[ordinal].name for ordinal in side] for side in runs]

    def to_document(self) -> dict[str, Any]:
        """Plain data, as it stands in the file."""
        document = to_plain(replace(self, chain=None, link=None))
        document["schedule"] = self.schedule.to_list()
        document["chain"] = None if self.chain is None else self.chain.to_dict()
        document["link"] = link_document(self.link)
        return {"format": FORMAT, "version": VERSION, **document}

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            ValueError: the file is missing, truncated, of another format or
                version, or lacks a field.
        """
        return cls.from_document(read_document(path, {FORMAT: VERSION}), str(path))

    @classmethod
    def from_document(cls, document: Mapping[str, Any], where: str) -> Plan:
        """Build a plan from its JSON document; ``where`` names it in errors."""
        data = {key: value for key, value in document.items() if key not in ("format", "version")}
        try:
            schedule = Schedule.from_list(data.pop("schedule"))
            chain = None if data.get("chain") is None else Chain.from_dict(data["chain"])
            link = link_from(data.get("link"))
            plain = {**data, "schedule": {"actions": []}, "chain": None, "link": None}
            plan = replace(from_plain(cls, plain), schedule=schedule, chain=chain, link=link)
            for menu in plan.menus:
                menu.check_positions()
            check_positions("menus", (stage.menu for stage in plan.stages), len(plan.menus), least=-1)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: expected the fields of a plan, got a mismatch: {error}; solve again") from error
        if any(not 0 <= action.stage < len(plan.stages) for action in plan.schedule.actions):
            raise ValueError(f"{where}: expected a schedule of its own stages, got others; solve again")
        if any(not _known_option(plan, action) for action in plan.schedule.actions):
            raise ValueError(f"{where}: expected options of its own menus, got others; solve again")
        if plan.chain is not None and not _fits(plan.chain, plan):
            raise ValueError(f"{where}: expected the chain of its own stages, got another one; solve again")
        return plan


def pieces_in_words(pieces: PiecesRecord) -> list[str]:
    """What runs in pieces, and what that means for the numbers, a line each."""
    of_head = (
        f"{pieces.head} and the loss: {counted(pieces.count, 'piece')} of at most {pieces.rows_at_once:,} rows, each "
        "forward and backward before the next"
    )
    modules = [f"{names}: pieces, run again in backward" for names in _modules(pieces)]
    rounding = (
        f"in pieces sums have another order: the loss is {pieces.loss_difference:.1e} off, gradients "
        f"{pieces.gradient_difference:.1e}"
    )
    return [*([of_head] if pieces.head else []), *modules, rounding]


def _in_pieces(pieces: PiecesRecord) -> list[str]:
    """The same in short."""
    head = [f"{pieces.head} in {counted(pieces.count, 'piece')}"] if pieces.head else []
    return [*head, *(f"{names} in pieces" for names in _modules(pieces))]


def _modules(pieces: PiecesRecord) -> list[str]:
    names = [module.name or WHOLE_MODEL for module in pieces.modules]
    return [names_in_short(names)] if names else []


def _known_option(plan: Plan, action: Action) -> bool:
    if action.kind in TRANSFERS:
        stage = plan.stages[action.stage]
        return 0 <= (action.option or 0) < max(len(stage.offload_units), len(stage.input_offload_units))
    return 0 <= (action.option or 0) <= _option_count(plan, action.stage)


def _option_count(plan: Plan, stage: int) -> int:
    menu = plan.stages[stage].menu
    return len(plan.menus[menu].options) if 0 <= menu < len(plan.menus) else 0


def _fits(chain: Chain, plan: Plan) -> bool:
    planned = [(stage.name, 1 + _option_count(plan, k)) for k, stage in enumerate(plan.stages)]
    return planned == [(stage.name, len(stage.options)) for stage in chain.stages]


def chain_in(plan: Plan, where: str = "a plan") -> Chain:
    """The chain that a plan was solved on; ``where`` names the plan in errors.

    Raises:
        ValueError: the plan has none, or one that does not give what the plan predicts.
    """
    if plan.chain is None:
        raise ValueError(
            f"{where}: expected a plan that carries the chain it was solved on, got one of an older release; "
            "solve the profile again"
        )
    if replay(plan.chain, plan.schedule, plan.link).peak_bytes != plan.predicted_peak_bytes:
        raise ValueError(
            f"{where}: expected its chain to give the predicted peak of {plan.predicted_peak_bytes} bytes, "
            "got another one; solve the profile again"
        )
    return plan.chain
