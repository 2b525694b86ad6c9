"""Options of the command line that several commands take, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.units import check_size, parse_bytes, parse_bytes_or_zero, show_sizes_like
from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    from planner.plans.offload_request import Offload, OffloadMode
    from planner.plans.solving import Numerics

# Help lists the solvers without importing them, which takes a quarter of a second; test_start.py compares.
CHAIN_SOLVERS = (
    "keep_all, recompute_all, chen_sqrt, chen_greedy, revolve, rotor, ilp, exhaustive, offload_only, pofo, "
    "offload_ilp, auto"
)
GRAPH_SOLVERS = "keep_all, demand, eviction, hierarchy, moments, exhaustive, auto"
GRAPH_SECONDS, LARGE_GRAPH_SECONDS, LARGE_GRAPH_NODES = 60.0, 25.0, 500
PARETO_SECONDS = 45.0  # of a graph
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
host_memory_callback = _checked("--host-memory", parse_bytes_or_zero)

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="The model: zoo:NAME, path/to/file.py:function or module:function, which returns a planner.Workload.",
    ),
]
OptionalTarget = Annotated[
    str | None,
    typer.Argument(metavar="[TARGET]", help="The model, as for profile. Default: the target that the plan records."),
]
SourceFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A profile, a chain problem or a graph problem; - is standard input.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE ...", help="Arguments of the target's function.")
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the target that the file records even if you did not make the file here."),
]
Device = Annotated[
    str | None, typer.Option(metavar="D", help="Move the model to this device first: cpu, cuda, cuda:1.")
]
DeviceOrCard = Annotated[
    str | None,
    typer.Option(
        metavar="D",
        help="Move the model to this device first: cpu, cuda:1; or estimate for a card, as h100, or a device file.",
    ),
]
_Budget = typer.Option(
    "--budget",
    metavar="B",
    callback=budget_callback,
    help="The most bytes alive at once in a step: 8GiB, 8GB, 512MiB, bytes, or 70% of the unplanned peak.",
)
BudgetText = Annotated[str, _Budget]
OptionalBudget = Annotated[str | None, _Budget]
SolverName = Annotated[
    str,
    typer.Option(metavar="NAME", help=f"For a profile or chain: {CHAIN_SOLVERS}. For a graph: {GRAPH_SOLVERS}."),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        callback=time_limit_callback,
        help="Seconds that searching solvers may take. Default for a graph: "
        f"{GRAPH_SECONDS:g}, or {LARGE_GRAPH_SECONDS:g} above {LARGE_GRAPH_NODES} nodes; for pareto "
        f"{PARETO_SECONDS:g} in all.",
    ),
]
AllowRounding = Annotated[
    bool,
    typer.Option(
        "--allow-rounding",
        help="Also let the output layer with its loss, and modules that treat each row independently, run a few rows "
        "at a time: less memory, but sums are rounded differently.",
    ),
]
HeadroomText = Annotated[
    str | None,
    typer.Option(
        "--headroom",
        metavar="B",
        callback=_checked("--headroom", _check_headroom),
        help="Part of the budget left free for the device's allocator: bytes (512MiB) or a share of the budget (5%); "
        "or, except for max-batch, auto: the amount measured while profiling.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and all else on stderr.")]
RulesFile = Annotated[
    Path | None,
    typer.Option("--rules", metavar="FILE", help="Decisions made by hand for some or all stages: .toml or .json."),
]
_LINK = "gbps=G, the link's speed in GB/s each way; devices=K that share the link; host=B, the most host memory to use."
OffloadText = Annotated[
    str | None,
    typer.Option(
        "--offload",
        metavar="HOW",
        help=f"Offload activations to host memory: no; only (recompute nothing); {_LINK} Joined by commas: "
        "only,gbps=25.",
    ),
]
OffloadBesideText = Annotated[
    str | None,
    typer.Option(
        "--offload",
        metavar="HOW",
        help=f"Offload activations to host memory: no; auto (the default); {_LINK} Joined by commas: "
        "gbps=25,host=64GiB.",
    ),
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="ddp|fsdp2",
        help="Under torchrun: wrap the model in DistributedDataParallel, or fully_shard it block by block.",
    ),
]


def out_option(what: str) -> Any:
    """The option ``-o`` of a command; ``what`` says which endings it writes what to."""
    return typer.Option("-o", "--output", metavar="FILE", help=what)


def numerics_of(allow_rounding: bool) -> Numerics:
    """The value of ``numerics`` for ``--allow-rounding``."""
    return "rounding" if allow_rounding else "eager"


def offload_of(text: str | None, *, only: bool = True) -> Offload | None:
    """The request that ``--offload`` makes; None where it says nothing.

    Args:
        text: such as ``only,gbps=25,host=64GiB``.
        only: whether the command can leave out recomputation.

    Raises:
        ValueError: an unknown word, or a value that cannot be.
    """
    from planner.plans.offload_request import Offload

    modes: dict[str, OffloadMode] = {"no": "never", "auto": "auto", **({"only": "only"} if only else {})}
    numbers: dict[str, tuple[str, Callable[[str], Any]]] = {
        "gbps": ("link_gbps", float), "devices": ("devices_per_link", int), "host": ("host_memory", str)
    }  # fmt: skip
    found: dict[str, Any] = {}
    for part in (text or "").split(",") if text is not None else ():
        key, equals, value = part.strip().partition("=")
        name, read = numbers.get(key, ("mode", modes.get))
        if (key not in numbers if equals else key not in modes) or name in found:
            here = "" if only or key != "only" else "'only' is for solve and pareto; this command recomputes as well: "
            raise ValueError(
                f"--offload: {here}expected {', '.join(modes)}, gbps=G, devices=K or host=B, each once and joined by "
                f"commas, got {text!r}; write for example gbps=25,host=64GiB"
            )
        try:
            found[name] = read(value if equals else key)
        except ValueError as error:
            raise ValueError(f"--offload: expected a number after {key}=, got {value!r}; correct it") from error
    try:
        request = Offload(**found)
    except ValueError as error:
        raise ValueError(f"--offload: {str(error).partition(': ')[2]}") from error
    return None if request == Offload() else request


def offload_text(
    text: str | None,
    *,
    no_offload: bool,
    offload_only: bool,
    link_gbps: float | None,
    devices_per_link: int | None,
    host_memory: str | None,
) -> str | None:
    """The offload request of ``--offload``, or of the options that it replaces.

    Raises:
        ValueError: two of them contradict each other.
    """
    if no_offload and offload_only:
        raise ValueError("--no-offload, --offload-only: they contradict each other; leave one out")
    mode = "no" if no_offload else "only" if offload_only else None
    numbers = (("gbps", link_gbps), ("devices", devices_per_link), ("host", host_memory))
    parts = [part for part in (text, mode, *(f"{key}={value}" for key, value in numbers if value is not None)) if part]
    return ",".join(parts) or text


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """The target on the command line: all of it, or its differences from the one that the file records.

    Attributes:
        text: the target; None and ``RECORDED`` for the file's own.
        settings: of ``--set``.
        device: of ``--device``.
        option: where the target is written, for errors.
        trust: ``--trust``: run the file's own target, whoever made the file.
    """

    text: str | None
    settings: Sequence[str] | None = None
    device: str | None = None
    option: str = "TARGET"
    trust: bool = False

    def chosen(self, recorded: TargetRecord | None, file: Path | None) -> TargetRecord:
        """The target that is named, else the recorded one with the settings and the device given here.

        Args:
            recorded: the target in the plan or profile; None where it has none.
            file: the plan or profile; None where there is none.

        Raises:
            ValueError: neither is there; or only the file names it, and this user did not make the file here.
        """
        if self.text not in (None, RECORDED):
            return TargetRecord.given(self.text, self.settings, self.device)
        if recorded is not None:
            if not (self.trust or recorded.of_zoo or recorded.made_here):
                raise ValueError(
                    f"{self.option}: the code that {file} names is not run, because you did not make the file on this "
                    f"machine: {recorded.arguments} (in {recorded.folder!r}); if you know that code, add --trust, or "
                    "name it as TARGET"
                )
            return recorded.with_changes(self.settings or (), self.device).proven()
        why = "" if file is None else f"; {file} records none, as it was made in Python or by an older release"
        raise ValueError(
            f"{self.option}: the command needs a model to run, and none is named{why}; "
            "name it: zoo:NAME or path/to/file.py:function"
        )
