"""Planning: a profile and a budget in, a certified plan out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from planner.cost_model import chain_of
from planner.parcels import input_parcels, kept_parcels
from planner.plan import Decision, Plan, PlannedStage
from planner.program import program_of
from planner.sizes import format_bytes, format_seconds, parse_bytes
from profiler.records import OptionRecord, Profile, StageRecord
from solvers import Chain, Problem, Schedule, Solution, replay, solve_chain
from solvers.graph_schedule import GraphSchedule
from solvers.simulator import Replay

AnySchedule = TypeVar("AnySchedule", Schedule, GraphSchedule)


class NoPlan(ValueError):
    """No schedule came out, and what is known instead.

    Attributes:
        status: ``infeasible`` (proven) or ``unknown``.
        minimum_budget_bytes: the smallest budget that is known to be feasible.
        reason: the stage and moment, or the node, that force it.
        solver: the method that was asked.
        budget_bytes: what was asked for.
        lower_bound_seconds: of a whole step; None where nothing finite is known.
        solve_seconds: time that the solver took; None where it is not known.
    """

    status: ClassVar[Literal["infeasible", "unknown"]]

    def __init__(
        self,
        *,
        minimum_budget_bytes: int,
        reason: str,
        solver: str,
        budget_bytes: int,
        lower_bound_seconds: float | None = None,
        solve_seconds: float | None = None,
    ) -> None:
        self.minimum_budget_bytes = minimum_budget_bytes
        self.reason = reason
        self.solver = solver
        self.budget_bytes = budget_bytes
        self.lower_bound_seconds = lower_bound_seconds
        self.solve_seconds = solve_seconds
        super().__init__(self._message())

    def _message(self) -> str:
        raise NotImplementedError

    @property
    def _asked(self) -> str:
        return f"{self.budget_bytes} ({format_bytes(self.budget_bytes)}) with solver {self.solver!r}"

    @property
    def _known(self) -> str:
        return f"{self.minimum_budget_bytes} bytes ({format_bytes(self.minimum_budget_bytes)})"

    @property
    def _or_auto(self) -> str:
        return "" if self.solver == "auto" else " or try solver 'auto'"


class Infeasible(NoPlan):
    """No schedule fits the budget; ``minimum_budget_bytes`` is the smallest one that the solver can meet."""

    status = "infeasible"

    def _message(self) -> str:
        return (
            f"budget: expected at least {self._known}, the least known to be enough, got {self._asked}: {self.reason}; "
            f"raise the budget, make the batch smaller{self._or_auto}"
        )


class NothingFound(NoPlan):
    """The search ended without a schedule, and without a proof that there is none."""

    status = "unknown"

    def _message(self) -> str:
        spent = "" if self.solve_seconds is None else f" in {format_seconds(self.solve_seconds)}"
        bound = "" if self.lower_bound_seconds is None else f", any would take {self.lower_bound_seconds:.6g} s or more"
        return (
            f"budget: expected a schedule within it, got none{spent} for {self._asked}; it is not proven that there is "
            f"none{bound}; the smallest budget known to be feasible is {self._known}: {self.reason}; "
            f"allow more time, raise the budget{self._or_auto}"
        )


def solve(
    profile: Profile | str | Path,
    budget: str | int,
    *,
    solver: str = "auto",
    time_limit_seconds: float | None = None,
) -> Plan:
    """Choose what to keep and what to recompute so that the step's true peak stays within ``budget``.

    Args:
        profile: a Profile or the path of its file.
        budget: bytes, ``"8GiB"``, ``"512MiB"`` or ``"70%"`` of the unplanned peak.
        solver: a name of ``solvers.solver_names()``.
        time_limit_seconds: for solvers that search (``ilp``, ``auto``).

    Returns:
        The plan, replayed in exact bytes, with its bound.

    Raises:
        Infeasible: nothing fits; carries the smallest feasible budget.
        ValueError: unknown solver, or a budget that does not parse.
    """
    if not isinstance(profile, Profile):
        profile = Profile.load(profile)
    budget_bytes = parse_bytes(budget, whole_bytes=profile.unplanned_peak_bytes)
    chain = chain_of(profile)
    beside = profile.unplanned_seconds - chain.unplanned_seconds
    solution = feasible_solution(chain, budget_bytes, solver, time_limit_seconds, beside_seconds=beside)
    return plan_of(profile, chain, solution, budget_bytes)


def feasible_solution(
    chain: Chain, budget_bytes: int, solver: str, time_limit_seconds: float | None, *, beside_seconds: float = 0.0
) -> Solution[Schedule]:
    """The solver's answer for a chain; raises Infeasible where it has none.

    ``beside_seconds`` of a step lie outside the chain: a refusal's bound has them.
    """
    problem = Problem(chain=chain, budget_bytes=budget_bytes)
    solution = solve_chain(problem, solver=solver, time_limit_seconds=time_limit_seconds)
    return with_schedule(solution, budget_bytes, solver, beside_seconds=beside_seconds)


def with_schedule(
    solution: Solution[AnySchedule], budget_bytes: int, solver: str, *, beside_seconds: float = 0.0
) -> Solution[AnySchedule]:
    """The solution itself; raises Infeasible or NothingFound where it has no schedule."""
    if solution.schedule is not None:
        return solution
    assert solution.shortage is not None
    bound = solution.lower_bound_seconds + beside_seconds
    raise (Infeasible if solution.status == "infeasible" else NothingFound)(
        minimum_budget_bytes=solution.shortage.minimum_budget_bytes,
        reason=solution.shortage.reason,
        solver=solver,
        budget_bytes=budget_bytes,
        lower_bound_seconds=bound if math.isfinite(bound) else None,
        solve_seconds=solution.solve_seconds,
    )


def plan_of(profile: Profile, chain: Chain, solution: Solution[Schedule], budget_bytes: int) -> Plan:
    """Bind a feasible solution to the profile's stage names and state its claims."""
    assert solution.schedule is not None and solution.gap is not None
    assert solution.status in ("optimal", "feasible")
    replayed = replay(chain, solution.schedule)
    stages = _planned_stages(profile, chain, solution.schedule, replayed)
    # Seconds outside forward and backward (optimizer) are those of the unplanned step.
    beside = profile.unplanned_seconds - chain.unplanned_seconds
    program_of(stages, solution.schedule)  # Refuses here what could not be applied.
    seconds = replayed.seconds + beside
    bound = min(seconds, solution.lower_bound_seconds + beside)
    return Plan(
        model_class=profile.model_class,
        profile_fingerprint=profile.fingerprint,
        input_shapes=profile.input_shapes,
        device=profile.device,
        precision=profile.precision,
        solver=solution.solver,
        status=solution.status,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=replayed.peak_bytes,
        predicted_seconds=seconds,
        unplanned_peak_bytes=profile.unplanned_peak_bytes,
        unplanned_seconds=profile.unplanned_seconds,
        resident_bytes=profile.resident.total,
        recomputed_seconds=sum(stage.extra_seconds for stage in stages),
        recomputed_ops=sum(stage.extra_ops for stage in stages),
        lower_bound_seconds=bound,
        gap=max(0.0, (seconds - bound) / seconds) if seconds > 0 else 0.0,
        solve_seconds=solution.solve_seconds,
        stages=stages,
        schedule=solution.schedule,
        menus=profile.menus,
        chain=chain,
        resident=profile.resident,
    )


def _planned_stages(profile: Profile, chain: Chain, schedule: Schedule, replayed: Replay) -> tuple[PlannedStage, ...]:
    runs = Counter(a.stage for a in schedule.actions if a.kind in ("forward", "recompute"))
    again: Counter[int] = Counter()
    extra_ops: Counter[int] = Counter()
    seen: set[int] = set()
    for moment in replayed.timeline:
        action, record = moment.action, profile.stages[moment.action.stage]
        if action.kind not in ("forward", "recompute"):
            continue
        if action.stage in seen:
            again[action.stage] += moment.seconds  # type: ignore[assignment]  # Counter adds floats as well.
            # With an option inside it does not stop at its last saved tensor: see ``planner.program``.
            stops = action.kind == "recompute" and not action.option
            extra_ops[action.stage] += record.recompute_ops if stops else record.forward_ops
        seen.add(action.stage)
    decisions = _decisions(profile.stages, schedule)
    chosen = _chosen_options(chain, schedule)
    sent = _sent_bytes(chain, schedule)
    for k, extra in _inner_seconds(chain, schedule, decisions).items():
        again[k] += extra  # type: ignore[assignment]
    for k, ops in _inner_ops(profile, chain, schedule).items():
        extra_ops[k] += ops
    return tuple(
        PlannedStage(
            name=record.name,
            kind=record.kind,
            module_class=record.module_class,
            decision=decisions[k],
            kept_bytes=_kept_bytes(record, decisions[k], profile, k, chosen.get(k, 0)),
            runs=runs[k],
            extra_seconds=float(again[k]),
            extra_ops=extra_ops[k],
            links=record.links,
            input_shapes=record.input_shapes,
            parameter_shapes=record.parameter_shapes,
            mutated_buffers=record.mutated_buffers,
            option=chain.stages[k].options[chosen[k]].name if k in chosen else "",
            menu=record.menu,
            recomputable=record.recomputable,
            parcels=kept_parcels(profile, k, _option_record(profile, k, chosen.get(k, 0))),
            input_parcels=input_parcels(profile, k),
            offloaded_bytes=sent[k],
        )
        for k, record in enumerate(profile.stages)
    )


def _option_record(profile: Profile, k: int, option: int) -> OptionRecord | None:
    return profile.menus[profile.stages[k].menu].options[option - 1] if option else None


def _sent_bytes(chain: Chain, schedule: Schedule) -> Counter[int]:
    """Bytes that each stage sends to host memory in one step."""
    found: Counter[int] = Counter()
    kept: dict[int, int] = {}
    for action in schedule.actions:
        if action.kind in ("forward", "recompute") and action.option is not None:
            kept[action.stage] = action.option
        elif action.kind == "offload":
            stage = chain.stages[action.stage]
            option = kept.get(action.stage)
            parcels = stage.parcels if option is None else stage.options[option].parcels
            found[action.stage] += parcels[action.option or 0]
    return found


def _chosen_options(chain: Chain, schedule: Schedule) -> dict[int, int]:
    """The option inside the stage that each selective stage goes backward with."""
    found: dict[int, int] = {}
    for action in schedule.actions:
        if action.kind in ("forward", "recompute") and action.option is not None:
            found[action.stage] = action.option
    return {k: option for k, option in found.items() if option}


def _inner_seconds(chain: Chain, schedule: Schedule, decisions: Sequence[Decision]) -> dict[int, float]:
    """Seconds that running ops again inside a stage adds to its backward, and to its forward where it runs once."""
    found = {}
    for k, option in _chosen_options(chain, schedule).items():
        keep, chosen = chain.stages[k].options[0], chain.stages[k].options[option]
        found[k] = chosen.backward_seconds - keep.backward_seconds
        if decisions[k] == "selective":
            found[k] += chosen.forward_seconds - keep.forward_seconds
    return found


def _inner_ops(profile: Profile, chain: Chain, schedule: Schedule) -> dict[int, int]:
    options = _chosen_options(chain, schedule)
    return {k: len(profile.menus[profile.stages[k].menu].options[option - 1].rerun) for k, option in options.items()}


def _decisions(records: tuple[StageRecord, ...], schedule: Schedule) -> list[Decision]:
    """Keep, recompute from a kept input, or (in a segment) from the stage before."""
    first: dict[int, int | None] = {}
    freed: set[int] = set()
    for action in schedule.actions:
        if action.kind == "backward" or (action.kind == "forward" and action.stage in first):
            break
        if action.kind == "recompute":
            break
        if action.kind == "forward":
            first[action.stage] = action.option
        elif action.kind == "free":
            freed.add(action.stage)
    found: list[Decision] = []
    for k, record in enumerate(records):
        if first.get(k, 0) is not None:
            found.append("selective" if first.get(k) else "keep")
        else:
            found.append("segment" if record.links and k - 1 in freed else "recompute")
    return found


def _kept_bytes(record: StageRecord, decision: Decision, profile: Profile, k: int, option: int) -> int:
    """Bytes this stage holds from forward to backward: what it saves, or its input, or nothing."""
    if decision == "selective":
        return max(0, record.kept_bytes - profile.menus[record.menu].options[option - 1].freed_bytes)
    if decision == "keep":
        return (
            record.kept_bytes
            if record.kind == "stage"
            else max(0, record.forward.end_bytes - record.forward.start_bytes)
        )
    if decision == "recompute" and record.links and k > 0:
        return profile.stages[k - 1].boundary_bytes
    return 0
