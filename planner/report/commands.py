"""The commands that make a plan again, and what else would help it, each with its command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.plans.plan import Plan
from planner.plans.refusals import obstacle_in_words, remedy_in_words
from planner.units import format_bytes, format_seconds
from profiler.records import is_of_whole_model


def target_of(plan: Plan) -> str:
    """The target of a plan's model with its settings, for a command line; ``TARGET`` where Python made it."""
    return "TARGET" if plan.target is None else plan.target.arguments


def commands_of(plan: Plan, target: str | None = None, plan_file: str | Path = "plan.json") -> tuple[str, ...]:
    """The commands that make a plan, use it and report it; ``target``: another than the plan's."""
    given = "" if target is None and plan.target is not None else f"{target or target_of(plan)} "
    whole = " --stages whole" if is_of_whole_model(plan.stages) else ""
    rules = " --rules RULES" if plan.stated else ""
    return (
        f"planner profile {target or target_of(plan)}{whole}{rules} -o {_profile_file(plan_file)}",
        solve_command(plan, plan.budget_bytes, plan_file),
        f"planner train {given}--plan {_quoted(plan_file)}",
        f"planner show {_quoted(plan_file)} -o report.html",
    )


def solve_command(plan: Plan, budget_bytes: int, plan_file: str | Path = "plan.json") -> str:
    """The command that solves for a budget as a plan was solved."""
    headroom = f" --headroom {plan.headroom_bytes}" if plan.headroom_bytes and budget_bytes == plan.budget_bytes else ""
    rules = " --rules RULES" if plan.stated else ""
    return (
        f"planner solve {_profile_file(plan_file)} --budget {budget_bytes}{headroom}{rules}{_offload_option(plan)} "
        f"-o {_quoted(plan_file)}"
    )


def _profile_file(plan_file: str | Path) -> str:
    """The profile beside a plan, as ``planner profile`` names it."""
    name = str(plan_file)
    return _quoted(f"{name.removesuffix('plan.json')}profile.json" if name.endswith("plan.json") else "profile.json")


def _quoted(path: str | Path) -> str:
    return shlex.quote(str(path))


def _offload_option(plan: Plan) -> str:
    """A link that was given has one rate in both directions; one that was measured is in the profile."""
    said = ["only"] if plan.offload_only else []
    link = plan.link
    if link is not None and link.to_host_bytes_per_second == link.to_device_bytes_per_second:
        said.append(f"gbps={link.to_host_bytes_per_second / 1e9:g}")
    if link is not None and link.host_bytes is not None:
        said.append(f"host={link.host_bytes}")
    return f" --offload {','.join(said)}" if said else ""


SHARES = (0.9, 0.75, 0.5)  # of the plan's budget
_LITTLE = 1.01  # times the unplanned step: no slowdown to speak of
_NOTABLE_SHARE = 0.25  # of the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRow:
    """Something to change, what it gives, and the command that does it; empty where there is none."""

    change: str
    effect: str
    command: str = ""


def lever_rows(plan: Plan, curve: Sequence[Plan], plan_file: str | Path) -> tuple[LeverRow, ...]:
    """The levers of a plan in a file; ``curve`` has the plans at other budgets, by rising peak."""
    return (*_budgets(plan, curve, plan_file), *_offload(plan), *_states(plan), *_blocks(plan), *_whole(plan))


def _budgets(plan: Plan, curve: Sequence[Plan], plan_file: str | Path) -> Iterator[LeverRow]:
    if not curve:
        return

    def at(point: Plan, change: str, budget_bytes: int | None = None) -> LeverRow:
        return LeverRow(
            change=change,
            effect=f"{format_seconds(point.predicted_seconds)} a step, {point.slowdown:.2f} times the unplanned step",
            command=solve_command(plan, budget_bytes or point.predicted_peak_bytes, plan_file),
        )

    free = next((each for each in curve if each.slowdown <= _LITTLE), None)
    if free is not None and plan.slowdown > _LITTLE:
        yield at(free, f"A budget of {format_bytes(free.predicted_peak_bytes)}")
    for share in SHARES:
        budget_bytes = int(share * plan.budget_bytes)
        within = [each for each in curve if each.predicted_peak_bytes <= budget_bytes]
        if within:
            yield at(within[-1], f"{share:.0%} of this budget, {format_bytes(budget_bytes)}", budget_bytes)
    smallest = curve[0]
    if smallest.predicted_peak_bytes < plan.predicted_peak_bytes:
        yield at(smallest, f"The smallest budget found, {format_bytes(smallest.predicted_peak_bytes)}")


def _offload(plan: Plan) -> Iterator[LeverRow]:
    if plan.link is not None or plan.slowdown <= _LITTLE:
        return
    why = plan.no_offload or "no link to host memory is in this plan"
    yield LeverRow(
        change="Offload to host memory",
        effect=f"not weighed here: {why}. Over a link of known speed tensors may wait there instead",
        command=f"planner solve profile.json --budget {plan.budget_bytes} --offload gbps=12 -o plan.json",
    )


def _states(plan: Plan) -> Iterator[LeverRow]:
    share = plan.resident_bytes / plan.budget_bytes
    if share >= _NOTABLE_SHARE:
        yield LeverRow(
            change="Another optimizer, precision or micro-batches",
            effect=f"{format_bytes(plan.resident_bytes)} ({share:.0%} of the budget) are there all the time: "
            "parameters, optimizer states, batch. No plan changes that; advise compares what does",
            command=f"planner advise {target_of(plan)} --budget {plan.budget_bytes}",
        )
    yield LeverRow(
        change="A larger batch",
        effect="how large it may get within the budget, without a plan and with one",
        command=f"planner max-batch {target_of(plan)} --budget {plan.budget_bytes}",
    )


def _blocks(plan: Plan) -> Iterator[LeverRow]:
    if plan.left_out:
        yield LeverRow(change=remedy_in_words(plan.left_out) or "Blocks", effect=obstacle_in_words(plan.left_out))


def _whole(plan: Plan) -> Iterator[LeverRow]:
    if plan.slowdown > _LITTLE and not is_of_whole_model(plan.stages):
        yield LeverRow(
            change="The whole model as one stage",
            effect="chooses among all ops of the step at once, where the model can be captured as one graph",
            command=f"planner profile {target_of(plan)} --stages whole -o whole.profile.json",
        )
