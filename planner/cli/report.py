"""Pages of what commands find out, to read in a browser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.shell import check_folder, given_command, is_first, note, say_written

if TYPE_CHECKING:
    from planner.plans.plan import Plan
    from planner.report.command_results import ResultSection
    from profiler.target_record import TargetRecord


def check_report(path: Path | None) -> None:
    """Refuse a page that could not be written, before anything is measured; raises ValueError."""
    if path is not None:
        from planner.report.page import check_page

        check_folder(path)
        check_page(path)


def write_result(
    path: Path | None,
    title: str,
    section: Callable[[], ResultSection],
    plan: Plan | None = None,
    target: TargetRecord | None = None,
) -> None:
    """Write a command's result as a page, with the plan that came out of it; nothing without a path.

    Args:
        path: of the page.
        title: its heading.
        section: the result.
        plan: that came out of it.
        target: that the plan was made of, where it does not record it.

    Of several ranks the first one writes.
    """
    if path is None or not is_first():
        return
    from planner.report.page import Page, write_page
    from planner.report.plan_report import report_of_plan

    note("writing the report")
    explained = None if plan is None else report_of_plan(replace(plan, target=plan.target or target))
    write_page(Page(title=title, plan=explained, results=(section(),), commands=(given_command(),)), path)
    say_written(path)
