"""The commands that make a plan again, and others like it."""

from __future__ import annotations

import shlex
from pathlib import Path

from planner.plans.plan import Plan
from profiler.records import is_of_whole_model


def target_of(plan: Plan) -> str:
    """What the command line built the model of a plan from, with its settings; ``TARGET`` where Python made it."""
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
        f"planner show {_quoted(plan_file)} --html report.html",
    )


def solve_command(plan: Plan, budget_bytes: int, plan_file: str | Path = "plan.json") -> str:
    """The command that solves for a budget as a plan was solved."""
    headroom = f" --headroom {plan.headroom_bytes}" if plan.headroom_bytes and budget_bytes == plan.budget_bytes else ""
    only = " --offload-only" if plan.offload_only else ""
    rules = " --rules RULES" if plan.stated else ""
    return (
        f"planner solve {_profile_file(plan_file)} --budget {budget_bytes}{headroom}{rules}{_link(plan)}{only} "
        f"-o {_quoted(plan_file)}"
    )


def _profile_file(plan_file: str | Path) -> str:
    """The profile beside a plan, as ``planner profile`` names it."""
    name = str(plan_file)
    return _quoted(f"{name.removesuffix('plan.json')}profile.json" if name.endswith("plan.json") else "profile.json")


def _quoted(path: str | Path) -> str:
    return shlex.quote(str(path))


def _link(plan: Plan) -> str:
    """A link that was given has one rate in both directions; one that was measured is in the profile."""
    link = plan.link
    if link is None:
        return ""
    host = "" if link.host_bytes is None else f" --host-memory {link.host_bytes}"
    if link.to_host_bytes_per_second != link.to_device_bytes_per_second:
        return host
    return f" --link-gbps {link.to_host_bytes_per_second / 1e9:g}{host}"
