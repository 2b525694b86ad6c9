"""The plan: a schedule bound to a model's stage names, with what it predicts; saved as versioned JSON."""

from __future__ import annotations

import hashlib
import html
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from planner.pictures import AliveDuring, SvgPicture, html_table, small_timeline
from planner.plans.offload_request import link_document, link_from
from planner.units import counted, format_bytes, format_seconds, names_in_short
from profiler.device_record import EstimateRecord
from profiler.json_files import check_positions, from_plain, read_document, to_plain, write_document
from profiler.records import WHOLE_MODEL, LeftOutRecord, MenuRecord, PiecesRecord, ResidentBytes, StageRecord
from profiler.target_record import TargetRecord
from solvers.problem.chain import Chain, Link
from solvers.problem.schedule import RUNS, TRANSFERS, Action, Schedule
from solvers.problem.simulator import replay

FORMAT = "planner-plan"
VERSION = 3
FINGERPRINT_DIGITS = 16  # as in profiles

StageDecision = Literal["keep", "selective", "offload", "recompute", "segment"]
_DONE: dict[StageDecision, str] = {
    "keep": "kept",
    "selective": "recomputed in part",
    "offload": "sent to host memory",
    "recompute": "recomputed",
    "segment": "recomputed in segments",
}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a search for a plan.

    Attributes:
        plan: the best plan until then.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        super().__init__(f"the search for a plan: {plan!r} is the best until then")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """One stage of a plan: the decision for it, and the data that the applier needs.

    Attributes:
        record: the stage in the profile; with it a plan can be solved again without the profile.
        decision: ``keep``; ``offload`` (kept, some of it in host memory meanwhile);
            ``selective`` (some of its ops are recomputed, see ``option``);
            ``recompute`` (its input is kept, all of it is recomputed);
            ``segment`` (its input is dropped too and comes from the stage before).
            Parts outside of stages are always kept.
        kept_bytes: bytes kept from its forward to its backward.
        runs: forwards of it in one step, the first included.
        extra_seconds: predicted seconds that the plan adds to it.
        extra_ops: aten ops that the plan adds to it.
        option: the recomputed ops of a selective stage, in words.
        offload_units: kept storages that may be sent to host memory, by their numbers in its ops.
        input_offload_units: input tensors that may be sent while it waits for its recomputation, by number, per unit.
        offloaded_bytes: bytes sent to host memory in one step.
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
class Plan:
    """A schedule with the names of a model's stages, and its predictions, for one whole training step.

    Attributes:
        model_class, input_shapes, device, precision: as in the profile.
        solver: the method that found the plan.
        status: ``optimal``: no plan that does the same kind of things within the budget is faster; ``feasible``: see
            ``lower_bound_seconds``.
        budget_bytes: the most bytes that may be alive at once.
        headroom_bytes: the part of the budget reserved for memory that the device's allocator wastes; the solver used
            the rest.
        predicted_peak_bytes, predicted_seconds: by exact replay.
        unplanned_peak_bytes, unplanned_seconds: the step of the model without a plan.
        resident_bytes: bytes alive during the whole step: parameters, optimizer states, batch, what the loop holds.
        recomputed_seconds: predicted seconds spent on recomputation.
        recomputed_ops: number of recomputed ops, each recomputation counted; exact.
        lower_bound_seconds: a lower bound on the time of all such plans within the budget.
        gap: relative distance of the prediction from that bound.
        solve_seconds: time that the solver took.
        link: the link to host memory that the plan may use; None where nothing could be sent.
        host_bytes: the most bytes that the plan holds in host memory at once.
        stall_seconds: predicted seconds in which computation waits for copies.
        no_offload: the reason why nothing could be sent to host memory where offloading was requested; otherwise empty.
        offload_only: whether a plan without recomputation was requested; ``solver`` may name that method anyway.
        stated: the manual decisions and their outcome, one line each; empty for a plan without any.
        restricted: whether status and bound hold only among plans with the same manual decisions.
        target: as in the profile.
        interrupted: whether Ctrl-C ended the search; this is the best plan until then.
        profile_fingerprint: fingerprint of the profile.
        stages: the decision for each stage.
        schedule: the order of actions.
        menus: ops and options of each kind of stage; option k of the schedule, from 1, is ``options[k - 1]``.
        chain: the problem that the schedule solves; None in files of older releases.
        resident: ``resident_bytes`` by owner; None in files of older releases.
        unseen, unsteady, batch_sized, forward_nodes, in_flight: as in the profile.
        left_out: blocks that keep much and cannot be recomputed, whatever the budget.
        frugal: as in the profile: unplanned peak and seconds were computed, and never measured as a whole.
        saved_seconds: seconds of the unplanned step that the plan saves: gathers of parameters, and the head all at
            once; below zero where pieces take longer.
        pieces: the head together with its loss, and the modules, that run in pieces; None where nothing does.
        estimate: as in the profile: the device that all numbers are estimated for; None where they were measured.
    """

    model_class: str
    input_shapes: tuple[tuple[int, ...], ...]
    device: str
    precision: str
    solver: str
    status: Literal["optimal", "feasible"]
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_seconds: float
    unplanned_peak_bytes: int
    unplanned_seconds: float
    resident_bytes: int
    recomputed_seconds: float
    recomputed_ops: int
    lower_bound_seconds: float
    gap: float
    solve_seconds: float
    headroom_bytes: int = 0
    link: Link | None = None
    host_bytes: int = 0
    stall_seconds: float = 0.0
    no_offload: str = ""
    offload_only: bool = False
    stated: tuple[str, ...] = ()
    restricted: bool = False
    target: TargetRecord | None = None
    interrupted: bool = False

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
    estimate: EstimateRecord | None = None

    @property
    def slowdown(self) -> float:
        """Predicted seconds over unplanned seconds."""
        return self.predicted_seconds / self.unplanned_seconds if self.unplanned_seconds > 0 else 1.0

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model and of all decisions in order, equal on all ranks that run the same.

        Names, shapes, precision, the kind of device and every decision count, bytes and seconds do not.
        """
        about = [self.model_class, self.precision, self.device.split(":")[0], self._decided()]
        text = json.dumps(about, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]

    @property
    def other_bits(self) -> tuple[str, ...]:
        """Names of the stages that run as programs which round otherwise than their own code."""
        as_programs = {action.stage for action in self.schedule.actions if action.kind in RUNS and action.option}
        menus = {k: self.menus[self.stages[k].menu] for k in sorted(as_programs) if self.stages[k].menu >= 0}
        return tuple(self.stages[k].name for k, menu in menus.items() if menu.other_bits)

    def __repr__(self) -> str:
        return f"<{self.title}: {'; '.join(self._claims())}>"

    @property
    def title(self) -> str:
        """Whose plan it is, and the device that it is estimated for if it is."""
        estimated = "" if self.estimate is None else f", estimated for {self.estimate.device}"
        return f"Plan of {self.model_class}{estimated}"

    def _repr_html_(self) -> str:
        """For notebooks: the first lines of ``summary``, a table of decisions, and the timeline."""
        try:
            picture = self.timeline().svg
        except ValueError:  # A plan of an older release.
            picture = ""
        return f"<pre>{html.escape(self._in_short())}</pre>{self._decision_table()}{picture}"

    def summary(self) -> str:
        """Decisions, predictions and how good they are, in some lines; ``planner show`` says more."""
        recomputed = f"{counted(self.recomputed_ops, 'op')} recomputed, {format_seconds(self.recomputed_seconds)}"
        host = f"{format_bytes(self.host_bytes)} in host memory at most, {format_seconds(self.stall_seconds)} waited"
        lines = [self._in_short(), recomputed, *([host] if self.host_bytes else []), *self.stated]
        lines += [] if self.pieces is None else pieces_in_words(self.pieces)
        for decision, stages in self._by_decision().items():
            lines.append(f"{decision}: {names_in_short([stage.name for stage in stages])}")
        return "\n".join(lines)

    def _in_short(self) -> str:
        size = ", ".join("x".join(map(str, shape)) for shape in self.input_shapes)
        where = f"inputs {size or 'as any'}; {self.precision} on {self.device}"
        interrupted = "interrupted, " if self.interrupted else ""
        found = f"{interrupted}{self.status}, by {self.solver} in {format_seconds(self.solve_seconds)}"
        least = self.lower_bound_seconds / self.unplanned_seconds if self.unplanned_seconds > 0 else 1.0
        bound = f"no such plan is faster than {least:.3g} times it"
        unplanned = f"unplanned {format_bytes(self.unplanned_peak_bytes)}, {format_seconds(self.unplanned_seconds)}"
        estimated = [] if self.estimate is None else [f"estimated {self.estimate.in_words()}"]
        head = f"Plan of {self.model_class} ({where})"
        return "\n".join([head, *estimated, *self._claims(), unplanned, f"{found}; {bound}"])

    def in_one_line(self) -> str:
        """Model, peak, budget, slowdown, how good that is, and how many stages and ops are kept or recomputed."""
        decisions: Counter[StageDecision] = Counter(stage.decision for stage in self.stages if stage.kind == "stage")
        counts = ", ".join(f"{number} {_DONE[decision]}" for decision, number in decisions.items())
        done = [f"of {counted(decisions.total(), 'stage')} {counts}", *(_in_pieces(self.pieces) if self.pieces else [])]
        host = f", {format_bytes(self.host_bytes)} in host memory" if self.host_bytes else ""
        done.append(f"{counted(self.recomputed_ops, 'op')} recomputed{host}")
        return f"p{self.title[1:]}: {'; '.join([*self._claims(), f'{self.status}, by {self.solver}', *done])}"

    def _claims(self) -> list[str]:
        """Peak and budget, and the time of the step."""
        peak = f"peak {format_bytes(self.predicted_peak_bytes)} of {format_bytes(self.budget_bytes)} allowed"
        return [peak, f"{self.slowdown:.2f} times the unplanned step"]

    def timeline(self) -> SvgPicture:
        """The bytes alive over forward and backward as a small picture, which notebooks show; a line is the budget.

        ``planner show plan.json -o step.png`` draws a larger one, with names.

        Raises:
            ValueError: the plan is of an older release, and carries no chain.
        """
        moments = replay(chain_in(self), self.schedule, self.link).timeline
        alive = [AliveDuring(m.seconds, m.before_bytes, m.peak_bytes, m.after_bytes) for m in moments]
        return small_timeline(alive, peak_bytes=self.predicted_peak_bytes, budget_bytes=self.budget_bytes)

    def _by_decision(self) -> dict[str, list[PlannedStage]]:
        """Stages by their decision, in words; parts outside of stages left out."""
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

    def seconds_outside(self, chain: Chain) -> float:
        """Seconds of the step that are in none of the stages of its chain: the optimizer's."""
        return self.unplanned_seconds - self.saved_seconds - chain.unplanned_seconds

    def offload_units_of(self, stage: int, option: int | None) -> tuple[tuple[int, ...], ...]:
        """The storages of each offload unit of a kept stage, or the input tensors of a dropped one's; by number."""
        planned = self.stages[stage]
        return planned.input_offload_units if option is None else tuple((number,) for number in planned.offload_units)

    def _decided(self) -> Any:
        """The parts of the model and the decisions for them, as plain data."""
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
        """The ops of a run of a program, in order; otherwise the action's number."""
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

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        write_document(path, self.to_document())

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
            raise ValueError(f"{where}: the fields of this plan cannot be read: {error}; solve again") from error
        if any(not 0 <= action.stage < len(plan.stages) for action in plan.schedule.actions):
            raise ValueError(f"{where}: the schedule names stages that the plan does not have; solve again")
        if any(not _known_option(plan, action) for action in plan.schedule.actions):
            raise ValueError(f"{where}: the schedule names options that the plan's menus do not have; solve again")
        if plan.chain is not None and not _fits(plan.chain, plan):
            raise ValueError(f"{where}: the chain has other stages than the plan; solve again")
        return plan


def pieces_in_words(pieces: PiecesRecord) -> list[str]:
    """Returns the parts that run in pieces, and the differences in the numbers, a line each."""
    of_head = (
        f"{pieces.head} and the loss: {counted(pieces.count, 'piece')} of at most {pieces.rows_at_once:,} rows, each "
        "forward and backward before the next"
    )
    modules = [f"{names}: pieces, recomputed in backward" for names in _modules(pieces)]
    rounding = "in pieces sums have another order: "
    if pieces.loss_difference is None or pieces.gradient_difference is None:
        rounding += "how far the loss and gradients are off is not known before it runs"
    else:
        rounding += f"the loss is {pieces.loss_difference:.1e} off, gradients {pieces.gradient_difference:.1e}"
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
            f"{where}: this plan of an older release lacks the chain that it was solved on; solve the profile again"
        )
    if replay(plan.chain, plan.schedule, plan.link).peak_bytes != plan.predicted_peak_bytes:
        raise ValueError(
            f"{where}: the replayed chain does not give the predicted peak of {plan.predicted_peak_bytes} bytes; "
            "solve the profile again"
        )
    return plan.chain
