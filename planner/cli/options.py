"""Options of the command line that several commands take, and what those of offloading and of a target come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.units import check_size, parse_bytes, parse_bytes_or_zero, show_sizes_like
from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    from planner.plans.offload_request import Offload
    from planner.plans.solving import Numerics

# What help says of solvers, which take a quarter of a second to import; tests/planner/cli/test_start.py compares.
CHAIN_SOLVERS = (
    "keep_all, recompute_all, chen_sqrt, chen_greedy, revolve, rotor, ilp, exhaustive, offload_only, pofo, "
    "offload_ilp, auto"
)
GRAPH_SOLVERS = "keep_all, demand, eviction, hierarchy, moments, exhaustive, auto"
GRAPH_SECONDS, LARGE_GRAPH_SECONDS, LARGE_GRAPH_NODES, GRAPH_GAP = 60.0, 25.0, 500, 1e-3
PARETO_SECONDS = 45.0  # of a graph
COMPARE_SECONDS = 10.0
RECORDED = "recorded"  # what stands for an option's TARGET where none is written: the file's own


def _checked(option: str, check: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """A callback that refuses a value before anything is done; what is wrong with it is said of the option."""

    def callback(value: str | None) -> str | None:
        try:
            if value is not None:
                check(value)
        except ValueError as error:
            raise ValueError(f"{option}: {str(error).partition(': ')[2]}") from error
        return value

    return callback


def _check_headroom(text: str) -> None:
    from planner.plans.headroom import AUTO, headroom_from

    if text != AUTO:  # Which refers to a profile.
        headroom_from(text)


def time_limit_callback(seconds: float | None) -> float | None:
    """Refuse a time in which nothing can be searched."""
    if seconds is not None and not seconds > 0:
        raise ValueError(f"--time-limit: expected seconds above zero, got {seconds}; leave it out for the default")
    return seconds


def _check_budget(text: str) -> None:
    check_size(text)
    show_sizes_like(text)


budget_callback = _checked("--budget", _check_budget)
limit_callback = _checked("--limit", parse_bytes)

TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="zoo:NAME, path/to/file.py:function or module:function")
]
OptionalTarget = Annotated[
    str | None,
    typer.Argument(
        metavar="[TARGET]", help="As for profile; of a plan that records its target, it may be left out, and --set too."
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE ...", help="Arguments of the target's function.")
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the target that a file records, whoever made the file."),
]
Device = Annotated[str | None, typer.Option(help="Move the model there first: cpu, cuda, cuda:1, ...")]
_Budget = typer.Option(
    "--budget", metavar="B", callback=budget_callback, help="8GiB, 8GB, 512MiB, bytes, or 70% of the unplanned peak."
)
BudgetText = Annotated[str, _Budget]
BudgetOrRules = Annotated[str | None, _Budget]  # rules alone state a plan without one
SolverName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Of a profile or a chain: {CHAIN_SOLVERS}. Of a graph: {GRAPH_SOLVERS}.",
    ),
]
NoMenus = Annotated[bool, typer.Option("--no-menus", help="Keep or recompute stages as a whole.")]
AllowRounding = Annotated[
    bool,
    typer.Option(
        "--allow-rounding", help="The head and its loss may run in pieces: less memory, sums in another order."
    ),
]
HeadroomText = Annotated[
    str | None,
    typer.Option(
        "--headroom",
        metavar="B",
        callback=_checked("--headroom", _check_headroom),
        help="Left free for what an allocator wastes: bytes, 5% of the budget, or auto: as profiled.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]
RulesFile = Annotated[
    Path | None,
    typer.Option("--rules", metavar="FILE", help="A manual plan, in whole or in part: .toml or .json."),
]
NoOffload = Annotated[bool, typer.Option("--no-offload", help="Send nothing to host memory.")]
OffloadOnly = Annotated[bool, typer.Option("--offload-only", help="Recompute nothing.")]
LinkGbps = Annotated[
    float | None, typer.Option(metavar="G", min=0, help="GB/s from device to host and back; as measured if unset.")
]
DevicesPerLink = Annotated[
    int | None, typer.Option(metavar="K", min=1, help="Devices that share the link, each with 1/K of it.")
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="B",
        callback=_checked("--host-memory", parse_bytes_or_zero),
        help="The most that this device may hold in host memory, as 64GiB.",
    ),
]
Measure = Annotated[
    str | None,
    typer.Option(
        metavar="[TARGET]",
        help="Run steps too and show what is measured; of the model that the plan records if no TARGET follows.",
    ),
]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write a page that explains the result, too: .html.")
]
SnapshotFile = Annotated[
    Path | None,
    typer.Option("--snapshot", metavar="FILE", help="Write the predicted step for pytorch.org/memory_viz: .pickle."),
]
Out = Annotated[Path | None, typer.Option("-o", "--output", help="File to write.")]


def numerics_of(allow_rounding: bool) -> Numerics:
    """What ``--allow-rounding`` comes to."""
    return "rounding" if allow_rounding else "eager"


def offload_options(
    no_offload: bool,
    link_gbps: float | None,
    devices_per_link: int | None,
    host_memory: str | None,
    *,
    offload_only: bool = False,
) -> Offload | None:
    """What was said of offloading; None where nothing was."""
    from planner.plans.offload_request import Offload

    if no_offload and offload_only:
        raise ValueError("--no-offload, --offload-only: expected one of them, got both; leave one out")
    offload_request = Offload(
        mode="never" if no_offload else "only" if offload_only else "auto",
        link_gbps=link_gbps,
        devices_per_link=devices_per_link,
        host_memory=host_memory,
    )
    return None if offload_request == Offload() else offload_request


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """What the command line says of the target: all of it, or what differs from the file's own.

    Attributes:
        text: of the target; None and ``RECORDED`` for the file's own.
        settings: of ``--set``.
        device: of ``--device``.
        option: where the target is written, for errors.
        trust: ``--trust``: run the file's own, whoever made the file.
    """

    text: str | None
    settings: Sequence[str] | None
    device: str | None = None
    option: str = "TARGET"
    trust: bool = False

    def chosen(self, recorded: TargetRecord | None, file: Path | None) -> TargetRecord:
        """The target that is named, else the recorded one with the settings and the device given here.

        Args:
            recorded: of a plan or a profile; None where it has none.
            file: that it would be in; None where there is none.

        Raises:
            ValueError: neither is there; or only the file names it, and this user did not make the file here.
        """
        if self.text not in (None, RECORDED):
            return TargetRecord.given(self.text, self.settings, self.device)
        if recorded is not None:
            if not (self.trust or recorded.of_zoo or recorded.made_here):
                raise ValueError(
                    f"{self.option}: {file} was not made by you on this machine, so the code that it names is not run: "
                    f"{recorded.arguments} (in {recorded.folder!r}); if you know that code, name it as TARGET or add "
                    "--trust"
                )
            return recorded.with_changes(self.settings or (), self.device).proven()
        got = "none" if file is None else f"none, and {file} records none (Python made it, or an older release)"
        raise ValueError(
            f"{self.option}: expected the model to train, got {got}; name it: zoo:NAME or path/to/file.py:function"
        )
