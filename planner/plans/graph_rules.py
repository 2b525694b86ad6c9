"""Manual plans of single ops: rules decide which forward ops are kept or recomputed, and the plan carries that out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from planner.plans import rule_patterns
from planner.plans.graph_plan import GraphPlan
from planner.plans.graph_solving import solve_graph_profile
from planner.plans.headroom import Headroom
from planner.plans.refusals import Infeasible
from planner.plans.rules import Rule, Rules, RuleTarget
from planner.plans.solving import plan_with_headroom
from planner.steps.graph_problem import StatedDecision
from planner.units import counted, parse_bytes
from profiler.graph_profile import GraphProfile
from profiler.op_graph import ChoiceError
from profiler.step_graph import StepGraph, StepOp

SOLVER = "by hand"
_ANY_BUDGET = 2**62  # bytes


def state_ops(
    profile: GraphProfile,
    rules: Rules,
    *,
    budget: str | int | None,
    solver: str,
    time_limit_seconds: float | None,
    headroom: Headroom,
) -> GraphPlan:
    """The plan of single ops that does what rules state; as ``planner.state``.

    Ops that are to be recomputed run again just before what first needs them in backward.
    """
    decided = DecidedOps(profile.graph, rules)
    within = partial(solve_graph_profile, profile, time_limit_seconds=time_limit_seconds, decisions=decided.decisions)

    def fully_stated(budget_bytes: int) -> GraphPlan:
        plan = replace(within(_ANY_BUDGET, solver="keep_all"), solver=SOLVER)
        if plan.predicted_peak_bytes > budget_bytes:
            raise Infeasible(
                minimum_budget_bytes=plan.predicted_peak_bytes,
                reason="what is stated needs them",
                solver=SOLVER,
                budget_bytes=budget_bytes,
            )
        return replace(plan, budget_bytes=budget_bytes)

    def partly_stated(budget_bytes: int) -> GraphPlan:
        plan = within(budget_bytes, solver=solver)
        return replace(plan, solver=f"{SOLVER} and {plan.solver}")

    if budget is not None:
        budget_bytes = parse_bytes(budget, whole_bytes=profile.unplanned_peak_bytes)
        plan = plan_with_headroom(budget_bytes, headroom, partly_stated if decided.undecided else fully_stated)
    elif decided.undecided:
        raise ValueError("rules: expected a budget for the ops left to the solver, got none; give one (--budget)")
    else:
        peak_bytes = fully_stated(_ANY_BUDGET).predicted_peak_bytes
        plan = plan_with_headroom(headroom.budget_above(peak_bytes), headroom, fully_stated)
    return replace(plan, stated=tuple(decided.lines), restricted=True)


class DecidedOps:
    """What is stated of a step's forward ops.

    Attributes:
        decisions: by ordinal; ops that are left to the solver are not among them.
        lines: one for each rule that says what it came to.
    """

    def __init__(self, step: StepGraph, rules: Rules) -> None:
        """Apply rules, the later of two that name the same op wins.

        Raises:
            ChoiceError: a name that matches nothing, checkpoints, or an op that must not run again.
        """
        self._forward = [(k, op) for k, op in enumerate(step.ops) if op.side == "forward"]
        self._readers: dict[int, list[int]] = {}
        for ordinal, op in enumerate(step.ops):
            for storage in op.reads:
                self._readers.setdefault(storage, []).append(ordinal)
        if rules.checkpoint_patterns:
            raise ChoiceError(
                "rules: expected none about checkpoints, which are stages, for a profile of single ops, got some; "
                "state ops and modules instead, or profile without --graph"
            )
        self.decisions: dict[int, StatedDecision] = {}
        if rules.rest == "keep":
            self.decisions = {ordinal: "keep" for ordinal, _ in self._forward}
        self.lines: list[str] = []
        for rule in rules.rules:
            named = sorted({ordinal for target in rule.targets for ordinal in self._named(rule, target)})
            for ordinal in named:
                if rule.action == "solve":
                    self.decisions.pop(ordinal, None)
                else:
                    self.decisions[ordinal] = rule.action
            self.lines.append(f"{rule.text}: {counted(len(named), 'op')}")

    @property
    def undecided(self) -> bool:
        """Whether some op is left to the solver."""
        return len(self.decisions) < len(self._forward)

    def _named(self, rule: Rule, target: RuleTarget) -> Iterable[int]:
        """The ops that a part of a rule names."""
        where = f"rule '{rule.text}'"
        inside = [(k, op) for k, op in self._forward if rule_patterns.names_module(target.module, op.module)]
        if not inside:
            raise rule_patterns.no_module_of_ops(where, target.module, [op.module for _, op in self._forward])
        if not target.ops:
            named = [k for k, _ in inside]
            return named if rule.action != "recompute" else self._but_outputs(named)
        found: set[int] = set()
        for pattern in target.ops:
            matched = _matched(pattern, inside)
            if not matched:
                raise rule_patterns.no_op(where, pattern, target.module, [op for _, op in inside])
            found.update(k for k, _ in matched)
            for _, op in matched:
                if rule.action == "recompute" and op.once_reason:
                    raise ChoiceError(
                        f"{where}: expected ops that may run again, got {op.name} ({op.op}): {op.once_reason}; keep it"
                    )
        return found

    def _but_outputs(self, named: Sequence[int]) -> list[int]:
        """Those of a module's ops that nobody outside of it reads in forward, and that may run again."""
        mine, by_ordinal = set(named), dict(self._forward)
        return [
            k
            for k in named
            if not by_ordinal[k].once_reason
            and all(
                reader in mine or reader not in by_ordinal
                for storage in by_ordinal[k].makes
                for reader in self._readers.get(storage, ())
            )
        ]


def _matched(pattern: str, inside: Sequence[tuple[int, StepOp]]) -> list[tuple[int, StepOp]]:
    """Patterns are those of stages' ops; the number alone is the op's ordinal in the step."""
    text, _, number = pattern.partition("#")
    if not text:
        return [(k, op) for k, op in inside if k == int(number)]
    matches = [(k, op) for k, op in inside if rule_patterns.names_op(text, op.op)]
    if not number:
        return matches
    by_module: dict[str, list[tuple[int, StepOp]]] = {}
    for k, op in matches:
        by_module.setdefault(op.module, []).append((k, op))
    return [each[int(number)] for each in by_module.values() if int(number) < len(each)]
