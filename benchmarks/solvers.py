"""Graph solvers: objective, bound, seconds and memory on the committed problems, and the numbers they have to reach."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.capture import PROBLEMS
from benchmarks.methods.published import method_names
from benchmarks.reporting import RESULTS, write_result
from benchmarks.solver_claims import OVERRUN_SECONDS, Run, best_known, contradictions, verdicts
from benchmarks.solver_runs import GRACE_SECONDS, Outcome, Task, read_graph, run_apart
from solvers.graph.lower_bound import smallest_working_set
from solvers.graph.orders import IndexedGraph, peak_profile
from solvers.graph.registry import DEFAULT_GAP, DEFAULT_SECONDS
from solvers.problem.graph import Graph

AUTO_SHARES, OTHER_SHARES = (0.1, 0.3, 0.5, 0.7), (0.5,)
AUTO_SECONDS, OTHER_SECONDS = 60.0, 20.0
LONG_SECONDS = 600.0
LONG_NODES = (350, 400)  # where the claim is on the distance from the best known
EXACT_PROBLEMS, EXACT_SECONDS = ("unet", "vgg16"), 600.0
QUICK_PROBLEMS, QUICK_SOLVERS = ("vgg16", "random-100"), ("auto", "keep_all", "demand", "lower_sets", "moments")
QUICK_SECONDS = 5.0
# Above this size OTHER_SECONDS are hopeless: the programs have a binary per pair of nodes. At 234 nodes and 50% none of
# the three found a plan in them; at 367, building, handing over and ending alone took 39 s (2 cores).
MOST_NODES = {"checkmate": 200, "checkmate_rounding": 200, "intervals": 200}
UNTRIED = "exhaustive"  # up to 12 nodes: benchmarks.graph_oracle


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A problem file and the ends of its scale of budgets.

    Attributes:
        least_bytes: what the largest op, or the end, needs: no smaller budget is feasible.
        peak_bytes: with every node run once.
    """

    name: str
    path: Path
    nodes: int
    least_bytes: int
    peak_bytes: int
    unplanned_seconds: float

    def budget_bytes(self, share: float) -> int:
        """The budget at a share of the way from the least to the peak."""
        return self.least_bytes + int(share * (self.peak_bytes - self.least_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One run to make; ``limit_seconds`` None leaves the time to the solver."""

    case: Case
    solver: str
    share: float
    limit_seconds: float | None
    gap: float = DEFAULT_GAP

    @property
    def too_large(self) -> bool:
        """Whether the solver is hopeless on a graph of this size in this time."""
        short = self.limit_seconds is not None and self.limit_seconds <= OTHER_SECONDS
        return short and self.case.nodes > MOST_NODES.get(self.solver, self.case.nodes)


def open_case(path: Path) -> Case:
    """A problem file as a case."""
    graph: Graph = read_graph(path)
    indexed = IndexedGraph(graph)
    return Case(
        name=path.stem,
        path=path.resolve(),
        nodes=indexed.count,
        least_bytes=smallest_working_set(indexed)[0],
        peak_bytes=int(peak_profile(indexed, range(indexed.count)).max()),
        unplanned_seconds=graph.unplanned_seconds,
    )


def problem_path(name: str) -> Path:
    """A path as it is, or the committed problem of that name; ``gpt4`` and ``random-100`` are enough.

    Raises:
        ValueError: neither a file nor the name of one problem.
    """
    if Path(name).is_file():
        return Path(name)
    committed = sorted(PROBLEMS.glob("*.json"))
    found = [path for path in committed if path.stem == name or path.stem.startswith(f"{name}-")]
    if len(found) == 1:
        return found[0]
    names = ", ".join(path.stem for path in committed)
    raise ValueError(f"a problem: expected a file or one of {names}, got {name!r}; name one")


def share_of(text: str) -> float:
    """``50%`` as 0.5; ValueError on anything else than a percentage from 0% to 100%."""
    number = text.removesuffix("%")
    share = float(number) / 100 if number.replace(".", "", 1).isdigit() and text.endswith("%") else -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"a budget: expected a percentage from 0% to 100%, got {text!r}; write 50%")
    return share


def plan(cases: Sequence[Case], options: argparse.Namespace) -> list[Ask]:
    """The runs that the command line asks for."""
    asks: list[Ask] = []
    for case in sorted(cases, key=lambda case: case.nodes):
        for solver in options.solvers:
            shares = options.budgets or (AUTO_SHARES if solver == "auto" else OTHER_SHARES)
            limit = options.time_limit or (AUTO_SECONDS if solver == "auto" else OTHER_SECONDS)
            asks += [Ask(case=case, solver=solver, share=share, limit_seconds=limit) for share in shares]
        asks += _unlimited(case, options) + _long(case, options)
    return asks


def _unlimited(case: Case, options: argparse.Namespace) -> list[Ask]:
    """The largest GPT without a time limit, as users run it."""
    if not case.name.startswith("gpt48-") or "auto" not in options.solvers:
        return []
    return [Ask(case=case, solver="auto", share=s, limit_seconds=None) for s in options.budgets or AUTO_SHARES]


def _long(case: Case, options: argparse.Namespace) -> list[Ask]:
    if not LONG_NODES[0] <= case.nodes <= LONG_NODES[1]:
        return []
    return [Ask(case=case, solver="auto", share=s, limit_seconds=LONG_SECONDS, gap=0.0) for s in options.long]


def exact_plan(options: argparse.Namespace) -> list[Ask]:
    """Checkmate's whole program and auto, both until the proof."""
    cases = [open_case(path) for path in options.exact]
    limit, shares = options.time_limit or EXACT_SECONDS, options.budgets or OTHER_SHARES
    return [
        Ask(case=case, solver=solver, share=share, limit_seconds=limit, gap=0.0)
        for case in cases
        for share in shares
        for solver in ("checkmate", "auto")
    ]


def run_all(asks: Sequence[Ask]) -> Iterator[Run]:
    """One after the other, each in a process of its own, with a line on stderr for whoever waits."""
    most = sum(ask.limit_seconds or DEFAULT_SECONDS for ask in asks if not ask.too_large)
    _say(f"{len(asks)} runs, at most about {most / 60:.0f} minutes")
    for place, ask in enumerate(asks, 1):
        run = _run(ask)
        _say(f"{place}/{len(asks)} {_line(run)}")
        yield run


def _line(run: Run) -> str:
    value = "no plan" if run.objective is None else f"{run.objective:.5f}"
    wall = run.outcome.wall_seconds or 0.0
    return f"{run.problem} {run.share:.0%} {run.solver}: {value}, {run.outcome.status}, {wall:.1f} s"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run(ask: Ask) -> Run:
    case, budget = ask.case, ask.case.budget_bytes(ask.share)
    if ask.too_large:
        remark = f"above {MOST_NODES[ask.solver]} nodes hopeless in {ask.limit_seconds:g} s"
        outcome = Outcome(status="too large", remark=remark)
    else:
        task = Task(
            path=str(case.path),
            solver=ask.solver,
            budget_bytes=budget,
            limit_seconds=ask.limit_seconds,
            gap=ask.gap,
        )
        outcome = run_apart(task)
    return Run(
        problem=case.name,
        nodes=case.nodes,
        solver=ask.solver,
        share=ask.share,
        budget_bytes=budget,
        unplanned_peak_bytes=case.peak_bytes,
        unplanned_seconds=case.unplanned_seconds,
        limit_seconds=ask.limit_seconds,
        outcome=outcome,
    )


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row per run, everything as text: what is not there is left empty."""
    best = best_known(runs)
    return pd.DataFrame([_row(run, best.get((run.problem, run.budget_bytes))) for run in runs])


def _row(run: Run, best: float | None) -> dict[str, Any]:
    outcome = run.outcome
    behind = None if best is None or run.objective is None else run.objective / best - 1
    used = None if outcome.peak_bytes is None else outcome.peak_bytes / run.budget_bytes
    return {
        "problem": run.problem,
        "nodes": run.nodes,
        "solver": run.solver,
        "budget": f"{run.share:.0%}",
        "of_unplanned_peak": f"{run.budget_bytes / run.unplanned_peak_bytes:.1%}",
        "limit_s": "default" if run.limit_seconds is None else f"{run.limit_seconds:g}",
        "objective": _text(run.objective, ".5f"),
        "bound": _text(run.bound, ".5f"),
        "gap_%": _text(None if run.gap is None else 100 * run.gap, ".3f"),
        "behind_best_%": _text(None if behind is None else 100 * behind, ".3f"),
        "status": outcome.status,
        "seconds": _text(outcome.wall_seconds, ".2f"),
        "peak_of_budget": _text(used, ".2%"),
        "process_MiB": _text(outcome.resident_mib, ".0f"),
        "found_by_or_why_not": outcome.remark,
    }


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def exact_table(runs: Iterable[Run]) -> pd.DataFrame:
    """Seconds to the proof, or that there was none in the time."""
    return pd.DataFrame([{**_row(run, None), "seconds_to_proof": _proof(run)} for run in runs]).drop(
        columns=["behind_best_%", "limit_s"]
    )


def _proof(run: Run) -> str:
    """Checkmate claims no optimum of all schedules: its own program is solved where it ends before the time does."""
    outcome, limit = run.outcome, run.limit_seconds or math.inf
    ended = outcome.wall_seconds is not None and outcome.wall_seconds < limit and outcome.seconds is not None
    proven = outcome.status == "optimal" or (run.solver == "checkmate" and ended)
    return f"{outcome.wall_seconds:.2f}" if proven and ended else f"none in {limit:g} s"


def notes(runs: Sequence[Run]) -> list[str]:
    """What the columns mean, and how the runs were made."""
    idle = [run.outcome.idle_mib for run in runs if run.outcome.idle_mib is not None]
    return [
        "budget: of the way from the largest op (or the end, if that needs more) to the unplanned peak, so 50% is "
        "halfway; of_unplanned_peak: the same budget as a share of that peak",
        "objective, bound: seconds of the step relative to those without a plan; the bound holds for every schedule "
        "within the budget; gap: between the two; behind_best: to the best run of this table at that budget",
        f"every solve in a process of its own, one after the other, killed {GRACE_SECONDS:g} s after its time limit; "
        f"OMP_NUM_THREADS: {os.environ.get('OMP_NUM_THREADS', 'not set')}",
        "seconds: of the call; process_MiB: most memory of the solver's process"
        + (f", of which Python, the libraries and the graph take up to {max(idle):.0f}" if idle else ""),
        f"solvers stop at a gap of {DEFAULT_GAP:.1%} (in runs of {LONG_SECONDS:g} s: of none)",
        "peak_of_budget: peak of the plan, replayed, as a share of the budget",
        f"runs whose bound is above another run's plan (has to be 0): {len(contradictions(runs))}",
        "unknown: no plan found and none ruled out; refused: by the solver; too large: not tried in so little time",
        f"not in this table: {UNTRIED}, for graphs of up to 12 nodes, in graph-oracle.md",
    ]


def options_from(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with names checked and budgets as shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    solvers = [name for name in method_names() if name != UNTRIED]
    parser.add_argument("--problems", nargs="+", metavar="NAME", help="names or graph files; default: all committed")
    parser.add_argument("--solvers", nargs="+", metavar="NAME", choices=solvers, help=f"of {', '.join(solvers)}")
    parser.add_argument("--budgets", nargs="+", metavar="SHARE", help="default: auto at 10 30 50 70%%, others at 50%%")
    parser.add_argument("--time-limit", type=float, metavar="S", help="default: auto 60, others 20, --exact 600")
    parser.add_argument("--quick", action="store_true", help="two small problems, five solvers, 50%%, 5 s")
    parser.add_argument("--long", nargs="*", metavar="SHARE", help="also 600 s of auto at 350-400 nodes; default 50%%")
    parser.add_argument("--exact", nargs="*", metavar="NAME", help="only checkmate's whole program against auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    try:
        _complete(options, solvers)
    except ValueError as error:
        parser.error(str(error))
    return options


def _complete(options: argparse.Namespace, solvers: Sequence[str]) -> None:
    if options.time_limit is not None and not options.time_limit > 0:
        raise ValueError(f"a time limit: expected seconds above zero, got {options.time_limit}; leave it out")
    if options.quick:
        options.problems, options.solvers = options.problems or QUICK_PROBLEMS, options.solvers or QUICK_SOLVERS
        options.budgets, options.time_limit = options.budgets or ["50%"], options.time_limit or QUICK_SECONDS
    options.solvers = options.solvers or solvers
    options.exact = (
        options.exact if options.exact is None else [problem_path(n) for n in options.exact or EXACT_PROBLEMS]
    )
    options.budgets = [share_of(text) for text in options.budgets or ()]
    options.long = [] if options.long is None else [share_of(text) for text in options.long or ["50%"]]
    named = options.problems or [str(path) for path in PROBLEMS.glob("*.json")]
    options.problems = [problem_path(name) for name in named]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the tables."""
    options = options_from(arguments)
    if options.exact is None:
        _write_all(options)
    else:
        _write_exact(options)


def _write_all(options: argparse.Namespace) -> None:
    runs = list(run_all(plan([open_case(path) for path in options.problems], options)))
    title = "Graph solvers on captured and random training steps"
    write_result(options.out, "solvers", title, table(runs), notes(runs))
    remarks = [
        "computed from the rows of auto in solvers.csv; value: of the worst problem; infeasible: proven, and left out",
        f"reached: every problem's value is at most what is asked, at most {OVERRUN_SECONDS:g} s after its time limit",
        "best known: the best of all runs of that table at the same budget; 99 and 160 nodes count as 100-150, 2610 as "
        "about 2000",
    ]
    write_result(options.out, "solvers-verdicts", "Numbers to reach", pd.DataFrame(verdicts(runs)), remarks)


def _write_exact(options: argparse.Namespace) -> None:
    runs = list(run_all(exact_plan(options)))
    remark = "checkmate's proof is of its own program, which leaves some schedules out; both are asked for a gap of 0"
    title = "Seconds to the proof: Checkmate's whole integer program and auto"
    write_result(options.out, "solvers-exact", title, exact_table(runs), [*notes(runs), remark])


if __name__ == "__main__":
    main()
