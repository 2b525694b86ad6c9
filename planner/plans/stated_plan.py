"""Manual plans: rules are resolved for the stages of a profile, and the plan that they state is predicted and bounded
like any other.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from planner.plans.cost_model import chain_of
from planner.plans.headroom import headroom_from
from planner.plans.lowering import can_carry_out
from planner.plans.plan import Plan
from planner.plans.refusals import Infeasible, require_schedule
from planner.plans.rules import (
    Rule,
    Rules,
    RuleTarget,
    inner_modules_named,
    makers_of_outputs,
    modules_named,
    names_stage,
    no_module,
    no_op,
    ops_inside,
    ops_named,
    parents_named,
    rules_from,
)
from planner.plans.solving import complete, plan_of, plan_with_headroom
from planner.plans.sources import given_profile
from planner.plans.stage_decisions import undecided_stages
from planner.units import counted, parse_bytes
from profiler.op_graph import ChoiceError, NamedStage, StageOps
from profiler.program_replay import forward_flow, runs_with
from profiler.records import Profile, StageRecord
from solvers import Chain, Problem, Schedule, Solution, replay, solve_chain
from solvers.chain.baselines import Segment, segmented_schedule
from solvers.chain.fixed_stages import expanded, restricted
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.persistent import shortage_of
from solvers.problem.schedule import RUNS, Action

SOLVER = "by hand"
_PROVEN = 1e-9  # relative distance from the bound that counts as none


def state(
    profile: Profile | str | Path,
    rules: Rules | Rule | Sequence[Rule] | str | Path,
    *,
    budget: str | int | None = None,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
    headroom: str | int = 0,
) -> Plan:
    """Return the plan that follows ``rules``.

    Args:
        profile: a Profile or the path of its file.
        rules: Rules, a list of them, or the path of a TOML or JSON file.
        budget: bytes, ``"8GiB"`` or ``"70%"`` of the unplanned peak. None: the plan's own peak. Required if a part is
            left to the solver.
        solver: for what is left to the solver; a name of ``solvers.solver_names()``.
        time_limit_seconds: for solvers that search.
        headroom: as for ``solve``; without a budget it comes on top of what the plan needs.

    Returns:
        The plan, replayed in exact bytes. Its bound holds for all plans within the budget; with something left to the
        solver (``Plan.restricted``) for those that do what is stated.

    Raises:
        Infeasible: the rules do not fit the budget; carries the bytes that they need.
        ChoiceError: as ``resolve_for``.
        ValueError: a stage that cannot be recomputed, or a missing budget.
    """
    start = time.perf_counter()
    profile = given_profile(profile, "state")
    resolved = resolve_for(profile, rules_from(rules))
    profile = _with_choices(profile, resolved)
    chain = chain_of(profile)
    spans = _spans(profile, chain, resolved)

    def plan_within(planned_bytes: int | None) -> Plan:
        if not any(span.undecided for span in spans):
            return _fully_stated(profile, chain, spans, planned_bytes, start)
        if planned_bytes is None:
            raise ValueError(
                "rules: they leave stages to the solver, which needs a budget; add --budget, or set rest = 'keep'"
            )
        problem = Problem(chain=chain, budget_bytes=planned_bytes)
        return _partly_stated(profile, spans, problem, solver, time_limit_seconds)

    left_free = headroom_from(headroom, profile)
    if budget is None:
        plan = plan_within(None)
        whole_bytes = left_free.budget_above(plan.budget_bytes)
        plan = replace(plan, budget_bytes=whole_bytes, headroom_bytes=whole_bytes - plan.budget_bytes)
    else:
        budget_bytes = parse_bytes(budget, whole_bytes=profile.unplanned_peak_bytes)
        plan = plan_with_headroom(budget_bytes, left_free, plan_within)
    return complete(replace(plan, stated=resolved.lines, solve_seconds=time.perf_counter() - start))


def resolve_for(profile: Profile, rules: Rules) -> ResolvedRules:
    """The decisions that rules state for the stages of a profile.

    Raises:
        ChoiceError: a name that matches nothing, rules that contradict each other, an op that must not run again, or
            ops of a stage that is not captured.
    """
    outside = {op.module for op in profile.op_records if op.place == "outside"}
    resolved = resolve_rules(rules, _named_stages(profile), outside)
    stages = [record for record in profile.stages if record.kind == "stage"]
    for record, directive in zip(stages, resolved.directives, strict=True):
        menu = profile.menus[record.menu] if record.menu >= 0 else None
        if directive.kind != "choice" or (menu is not None and menu.graph is not None and menu.options):
            continue
        why = record.reason or (menu.opaque if menu is not None else "")
        if profile.precision.endswith("compiled"):
            why = "the model is compiled, and compiled code shows no ops"
        remedy = "state it for the whole stage" if why else "profile with these rules (--rules, or rules=...)"
        raise ChoiceError(
            f"{directive.source}: only a stage that was captured as a graph can recompute single ops, and "
            f"{record.name!r} was not captured{f' ({why})' if why else ''}; {remedy}"
        )
    return resolved


def _fully_stated(
    profile: Profile, chain: Chain, spans: Sequence[Segment], budget_bytes: int | None, start: float
) -> Plan:
    """Everything is stated: the schedule is there, and the solver only bounds it."""
    schedule = _as_programs(profile, segmented_schedule(spans))
    replayed = replay(chain, schedule)
    budget_bytes = replayed.peak_bytes if budget_bytes is None else budget_bytes
    if replayed.peak_bytes > budget_bytes:
        raise Infeasible(
            minimum_budget_bytes=replayed.peak_bytes,
            reason=f"what is stated needs them: {shortage_of(chain, schedule).reason}",
            solver=SOLVER,
            budget_bytes=budget_bytes,
            solve_seconds=time.perf_counter() - start,
        )
    problem = Problem(chain=chain, budget_bytes=budget_bytes)
    solution = Solution(
        solver=SOLVER,
        status="feasible",
        schedule=schedule,
        peak_bytes=replayed.peak_bytes,
        seconds=replayed.seconds,
        lower_bound_seconds=min(solve_chain(problem).lower_bound_seconds, replayed.seconds),
        solve_seconds=0.0,
    )
    return plan_of(profile, problem, solution)


def _partly_stated(
    profile: Profile, spans: Sequence[Segment], problem: Problem, solver: str, time_limit_seconds: float | None
) -> Plan:
    """A part is stated: the solver plans for the chain in which that part is fixed."""
    seconds_outside_chain = profile.unplanned_seconds - problem.chain.unplanned_seconds
    stages = undecided_stages(profile)
    smaller = replace(
        problem,
        chain=restricted(problem.chain, spans),
        accepts=lambda schedule: can_carry_out(stages, expanded(schedule, spans)),
    )
    solved = solve_chain(smaller, solver=solver, time_limit_seconds=time_limit_seconds)
    solved = _with_proofs(solved, problem, spans)
    require_schedule(solved, problem.budget_bytes, f"{SOLVER} and {solver}", seconds_outside_chain)
    assert solved.schedule is not None
    schedule = _as_programs(profile, expanded(solved.schedule, spans))
    if replay(problem.chain, schedule).peak_bytes > problem.budget_bytes:
        schedule = expanded(solved.schedule, spans)
    solution = replace(solved, schedule=schedule, solver=f"{SOLVER} and {solved.solver}")
    plan = plan_of(profile, problem, solution)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    return replace(plan, restricted=True)


def _as_programs(profile: Profile, schedule: Schedule) -> Schedule:
    """The schedule, in which captured stages that run again as a whole do so as programs: they cost less to call."""
    actions: list[Action] = []
    seen: set[int] = set()
    for action in schedule.actions:
        menu = profile.stages[action.stage].menu
        once = profile.menus[menu].once if menu >= 0 else None
        if action.kind in RUNS and action.option == 0 and action.stage in seen and once is not None:
            action = replace(action, option=1 + profile.menus[menu].options.index(once))
        if action.kind in RUNS:
            seen.add(action.stage)
        actions.append(action)
    return replace(schedule, actions=tuple(actions))


def _with_proofs(solved: Solution, problem: Problem, spans: Sequence[Segment]) -> Solution:
    """The solution with claims that are proven of the chain without its shared tensors.

    The restricted chain may count those for longer than they are held.
    """
    if not problem.chain.shared:
        return solved
    fewest_bytes = restricted(replace(problem.chain, shared=()), spans)
    bound = bound_seconds(fewest_bytes, problem.budget_bytes)
    if solved.seconds is not None:
        status = "optimal" if solved.seconds <= bound * (1 + _PROVEN) else "feasible"
        return replace(solved, status=status, lower_bound_seconds=min(bound, solved.seconds))
    if math.isfinite(bound):
        return replace(solved, status="unknown", lower_bound_seconds=bound)
    assert solved.shortage is not None
    bound = bound_seconds(fewest_bytes, solved.shortage.minimum_budget_bytes)
    return replace(solved, status="infeasible", lower_bound_seconds=bound)


def _named_stages(profile: Profile) -> list[NamedStage]:
    return [
        NamedStage(name=record.name, parents=record.parents, ops=_ops(profile, record))
        for record in profile.stages
        if record.kind == "stage"
    ]


def _ops(profile: Profile, record: StageRecord) -> StageOps:
    if record.menu >= 0:
        menu = profile.menus[record.menu]
        return menu.ops if menu.graph is None else replace(forward_flow(menu.graph), modules=menu.ops.modules)
    return StageOps(ops=(), storages=(), modules=(("", record.module_class),))  # of a release without ops in profiles


def _with_choices(profile: Profile, resolved: ResolvedRules) -> Profile:
    """The profile with programs for what is stated of the ops of captured stages."""
    menus = [*profile.menus]
    stages = [record for record in profile.stages if record.kind == "stage"]
    for record, directive in zip(stages, resolved.directives, strict=True):
        graph = menus[record.menu].graph if record.menu >= 0 else None
        if directive.kind != "choice" or graph is None:
            continue
        runs = runs_with(graph, directive.rerun)
        if all(option.runs != runs for option in menus[record.menu].options):
            added = menus[record.menu].program(runs)
            menus[record.menu] = replace(menus[record.menu], options=(*menus[record.menu].options, added))
    return replace(profile, menus=tuple(menus))


def _spans(profile: Profile, chain: Chain, resolved: ResolvedRules) -> list[Segment]:
    """The chain cut by what is stated, and where a stage's input cannot come from the one before; what lies outside of
    stages is kept.
    """
    directives = iter(resolved.directives)
    spans: list[Segment] = []
    open_segment = False
    for k, record in enumerate(profile.stages):
        directive = next(directives) if record.kind == "stage" else _KEEP
        _check_recomputable(record, directive)
        if directive.kind == "segment" and open_segment and chain.stages[k].linked:
            spans[-1] = spans[-1]._replace(end=k + 1)
        else:
            spans.append(_span(profile, k, directive))
        open_segment = directive.kind == "segment" and not directive.ends_segment
    return spans


def _span(profile: Profile, k: int, directive: StageDirective) -> Segment:
    if directive.kind in ("recompute", "segment"):
        return Segment(k, k + 1)
    if directive.kind == "choice":
        return Segment(k, k + 1, option=_option(profile, profile.stages[k], directive))
    return Segment(k, k + 1, option=0, undecided=directive.kind == "solve")


def _check_recomputable(record: StageRecord, directive: StageDirective) -> None:
    if directive.kind in ("recompute", "segment") and not record.recomputable:
        reason = record.reason or "it does not repeat its result"
        raise ValueError(
            f"{directive.source}: expected stages that can be recomputed, got {record.name!r}: {reason}; keep it with "
            "a later rule"
        )


def _option(profile: Profile, record: StageRecord, directive: StageDirective) -> int:
    """The number of the program in which these ops run again."""
    menu = profile.menus[record.menu]
    assert menu.graph is not None
    runs = runs_with(menu.graph, directive.rerun)
    return 1 + next(number for number, option in enumerate(menu.options) if option.runs == runs)


DirectiveKind = Literal["keep", "recompute", "segment", "choice", "solve"]
_CHECKPOINTS = -1  # stands for the checkpoints where a rule's number is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDirective:
    """The decisions stated for one stage.

    Attributes:
        kind: ``keep``; ``recompute`` from its own input; ``segment``: recomputed together with its neighbours;
            ``choice``: some of its ops run again; ``solve``: left to the solver.
        rerun: the ordinals of those ops.
        ends_segment: it is a checkpoint: a segment ends with it.
        source: what states it, in words.
    """

    kind: DirectiveKind
    rerun: frozenset[int] = frozenset()
    ends_segment: bool = False
    source: str = ""


_KEEP = StageDirective(kind="keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRules:
    """One directive for each stage of a model, and one line for each rule that says what it came to."""

    directives: tuple[StageDirective, ...]
    lines: tuple[str, ...]


def resolve_rules(rules: Rules, stages: Sequence[NamedStage], outside: Collection[str]) -> ResolvedRules:
    """Apply rules to the stages of a model.

    Args:
        rules: what a person states.
        stages: of the model, in forward order.
        outside: names of modules that ran outside of stages.

    Raises:
        ChoiceError: a name that matches nothing, rules that contradict each other, or an op that must not run again.
    """
    resolution = _Resolution(rules, stages, outside)
    if rules.checkpoint_patterns:
        resolution.apply_checkpoints()
    for number, rule in enumerate(rules.rules):
        for target in rule.targets:
            resolution.apply_rule(number, rule, target)
    return resolution.resolved()


@dataclass(slots=True)
class _StageRules:
    """The decisions that the rules so far state for one stage.

    Attributes:
        kind, ends_segment: as in the directive; no kind where nothing is stated.
        source: number of the rule that decides the kind.
        rerun, forced: ordinals of the ops that run again, and of those that do even if they must not.
        last_rules: by the ordinal of an op, the number of the last rule that names it.
    """

    stage: NamedStage
    kind: DirectiveKind | None = None
    ends_segment: bool = False
    source: int = _CHECKPOINTS
    rerun: set[int] = field(default_factory=set)
    forced: set[int] = field(default_factory=set)
    last_rules: dict[int, int] = field(default_factory=dict)

    def state_whole(self, kind: DirectiveKind, number: int, force: bool = False) -> set[int]:
        """State what becomes of the whole stage; returns its ops."""
        ordinals = set(range(len(self.stage.ops.ops)))
        self.kind, self.source = kind, number
        self.rerun = ordinals if kind in ("recompute", "segment") else set()
        self.forced = set(self.rerun) if force else set()
        self.last_rules = dict.fromkeys(ordinals, number)
        return ordinals

    def state_ops(self, ordinals: set[int], rule: Rule, number: int) -> None:
        """State what becomes of some of its ops."""
        drops = rule.action == "recompute"
        if not drops or self.kind not in ("recompute", "segment"):
            self.kind, self.source = "choice", number
        self.rerun = self.rerun | ordinals if drops else self.rerun - ordinals
        if drops and rule.force:
            self.forced |= ordinals
        self.last_rules.update(dict.fromkeys(ordinals, number))


class _Resolution:
    """The rules while they are applied to all stages."""

    def __init__(self, rules: Rules, stages: Sequence[NamedStage], outside: Collection[str]) -> None:
        self._rules = rules
        self._named = stages
        self._outside = outside
        self._stages = [_StageRules(stage) for stage in stages]
        self._named_ops: defaultdict[int, list[tuple[int, set[int]]]] = defaultdict(
            list
        )  # by rule: pairs (stage, ordinals)

    def apply_checkpoints(self) -> None:
        """Everything up to the last checkpoint is in a segment."""
        ends = {k for pattern in self._rules.checkpoint_patterns for k in self._checkpoints(pattern)}
        for k, stage in enumerate(self._stages[: max(ends) + 1]):
            stage.ends_segment = k in ends
            self._named_ops[_CHECKPOINTS].append((k, stage.state_whole("segment", _CHECKPOINTS)))

    def _checkpoints(self, pattern: str) -> Iterable[int]:
        """The stages of that name; for a module that contains stages, the last one in it."""
        named = [k for k, stage in enumerate(self._named) if names_stage(pattern, stage)]
        if named:
            return named
        last = {name: k for k, stage in enumerate(self._named) for name in parents_named(pattern, stage)}
        if last:
            return last.values()
        inside = [stage.name for stage in self._named if inner_modules_named(pattern, stage)]
        if not inside:
            raise no_module("checkpoints", pattern, self._named, self._outside)
        raise ChoiceError(
            f"checkpoints: expected stages, whose outputs can be kept, got {pattern!r}, which lies inside stage "
            f"{inside[0]!r}; name that one, or make it a stage when profiling (--stages)"
        )

    def apply_rule(self, number: int, rule: Rule, target: RuleTarget) -> None:
        """Applies a rule to the modules, or to the ops in them, that one of its targets names."""
        named = ((k, modules_named(target.module, stage)) for k, stage in enumerate(self._named))
        modules = {k: names for k, names in named if names}
        if not modules:
            raise no_module(self._text(number), target.module, self._named, self._outside)
        inside = {k: [ops_inside(self._named[k].ops, name) for name in modules[k]] for k in modules}
        if target.ops:
            ordinals = self._ops_named(number, target, inside)
        else:
            whole = {k for k, names in modules.items() if "" in names}
            ordinals = self._ops_of_modules(number, rule, target, inside, whole)
        for k, of_stage in ordinals.items():
            if "" in modules[k] and not target.ops:
                self._stages[k].state_whole(rule.action, number, rule.force)
            else:
                self._stages[k].state_ops(of_stage, rule, number)
            self._named_ops[number].append((k, of_stage))

    def _ops_of_modules(
        self, number: int, rule: Rule, target: RuleTarget, inside: dict[int, list[list[int]]], whole: set[int]
    ) -> dict[int, set[int]]:
        """The ops of modules; to recompute one inside a stage, those that make its output are left out."""
        inner = [k for k in inside if k not in whole]
        if inner and rule.action == "solve":
            raise ChoiceError(
                f"{self._text(number)}: action = 'solve' applies to whole stages, and the named module lies inside "
                f"stage {self._named[inner[0]].name!r}; name that stage, or state what to do with its ops"
            )
        if not any(ops for modules in inside.values() for ops in modules):
            raise no_op(self._text(number), "", target.module, ())
        ordinals: dict[int, set[int]] = {}
        for k, modules in inside.items():
            drops = rule.action == "recompute" and k not in whole
            outputs = [makers_of_outputs(self._named[k].ops, ops) if drops else set() for ops in modules]
            ordinals[k] = {o for ops, makers in zip(modules, outputs, strict=True) for o in ops if o not in makers}
        return ordinals

    def _ops_named(self, number: int, target: RuleTarget, inside: dict[int, list[list[int]]]) -> dict[int, set[int]]:
        """The ops that the patterns of a target mean; each pattern means some."""
        ordinals: dict[int, set[int]] = {k: set() for k in inside}
        for pattern in target.ops:
            matches = {
                k: {o for ops in modules for o in ops_named(pattern, self._named[k].ops, ops)}
                for k, modules in inside.items()
            }
            if not any(matches.values()):
                known = [self._named[k].ops.ops[o] for k, modules in inside.items() for ops in modules for o in ops]
                raise no_op(self._text(number), pattern, target.module, known)
            for k, of_stage in matches.items():
                ordinals[k] |= of_stage
        return {k: of_stage for k, of_stage in ordinals.items() if of_stage}

    def resolved(self) -> ResolvedRules:
        """The directives, once it is sure that no rule is taken back as a whole by others."""
        for number in self._named_ops:
            self._refuse_contradiction(number)
        directives = tuple(self._directive(stage) for stage in self._stages)
        return ResolvedRules(directives=directives, lines=tuple(self._lines(directives)))

    def _refuse_contradiction(self, number: int) -> None:
        actions = {_CHECKPOINTS: "recompute", **{k: rule.action for k, rule in enumerate(self._rules.rules)}}
        last = [self._stages[k].last_rules[o] for k, ordinals in self._named_ops[number] for o in ordinals]
        if not last or any(actions[other] == actions[number] for other in last):
            return
        raise ChoiceError(
            f"rules: expected none that others take back as a whole, got {self._text(number)} and after it "
            f"{self._text(last[0])}; remove one of them, or let the later one name less"
        )

    def _directive(self, stage: _StageRules) -> StageDirective:
        if stage.kind is None:
            return StageDirective(kind=self._rules.rest)
        source = self._text(stage.source)
        if stage.kind != "choice":
            return StageDirective(kind=stage.kind, ends_segment=stage.ends_segment, source=source)
        try:
            rerun = stage.stage.ops.rerun_without(stage.rerun, forced=stage.forced)
        except ChoiceError as error:
            raise ChoiceError(
                f"{source}: stage {stage.stage.name!r}: {error} by a later rule, or set force = true to run it anyway"
            ) from error
        if not rerun:
            return StageDirective(kind="keep", source=source)
        return StageDirective(kind="choice", rerun=rerun, source=source)

    def _lines(self, directives: Sequence[StageDirective]) -> Iterator[str]:
        if self._rules.checkpoint_patterns:
            count = sum(directive.kind == "segment" for directive in directives)
            yield f"{self._text(_CHECKPOINTS)}: {counted(count, 'stage')} in segments"
        for number, rule in enumerate(self._rules.rules):
            yield f"{rule.text}: {self._effect(number, rule, directives)}"
        if self._rules.rest == "solve":
            yield "the rest: solved for"

    def _effect(self, number: int, rule: Rule, directives: Sequence[StageDirective]) -> str:
        """The outcome of a rule, in words."""
        ordinals = {
            k: {o for o, last in stage.last_rules.items() if last == number} for k, stage in enumerate(self._stages)
        }
        stages = [k for k in ordinals if ordinals[k]]
        if rule.action != "recompute":
            return counted(len(stages), "stage")
        whole = sum(directives[k].kind in ("recompute", "segment") for k in stages)
        counts = [len(ordinals[k] & directives[k].rerun) for k in stages if directives[k].kind == "choice"]
        effects = [f"{counted(whole, 'stage')} as a whole"] if whole else []
        if any(counts):
            effects.append(f"{counted(sum(counts), 'op')} in {counted(sum(map(bool, counts)), 'stage')}")
        return " and ".join(effects) or "nothing runs again, as backward needs nothing of it that is not kept anyway"

    def _text(self, number: int) -> str:
        if number == _CHECKPOINTS:
            return f"checkpoints {', '.join(self._rules.checkpoint_patterns)}"
        return f"rule {number + 1} ({self._rules.rules[number].text})"
