"""One solve of a graph problem in a process of its own: its seconds and memory are its own, and it can be killed.

``python -m benchmarks.solver_runs TASK`` solves the task given as JSON and prints its outcome as JSON. It loads no
torch, so that the memory it reports is the solver's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.methods.published import solve_with_any
from solvers.graph.registry import DEFAULT_SECONDS
from solvers.problem.graph import Graph
from solvers.problem.simulator import replay
from solvers.problem.solution import Solution

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 60.0  # beyond its time limit, before a solve is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to solve; ``limit_seconds`` None leaves the time to the solver."""

    path: str
    solver: str
    budget_bytes: int
    limit_seconds: float | None
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        status: the solution's, or ``refused`` (the solver takes no such graph), ``failed`` (the process did),
            ``killed`` (it did not end in time), ``too large`` (not tried).
        wall_seconds: of the call; of the process where it was killed.
        seconds, peak_bytes: of the schedule, as replayed; None without one.
        bound_seconds: no schedule within the budget is faster; None where no schedule exists or none was looked for.
        resident_mib: most memory of the process; None where the system does not tell.
        idle_mib: the same before the call, with the libraries and the graph loaded.
        remark: the method that found the schedule, or why there is none.
    """

    status: str
    wall_seconds: float | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    bound_seconds: float | None = None
    resident_mib: float | None = None
    idle_mib: float | None = None
    remark: str = ""


def read_graph(path: Path) -> Graph:
    """The graph of a problem file."""
    return Graph.from_dict(json.loads(path.read_text()))


def run_apart(task: Task, grace_seconds: float = GRACE_SECONDS) -> Outcome:
    """Solve in a new process; one that fails or hangs is an outcome too."""
    limit = (task.limit_seconds or DEFAULT_SECONDS) + grace_seconds
    command = [sys.executable, "-m", "benchmarks.solver_runs", json.dumps(asdict(task))]
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return Outcome(status="killed", wall_seconds=time.perf_counter() - begin, remark=f"after {limit:g} s")
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [""]
        remark = f"exit code {done.returncode}: {said[-1]}"
        return Outcome(status="failed", wall_seconds=time.perf_counter() - begin, remark=remark)
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def solve_here(task: Task) -> Outcome:
    """Solve in this process."""
    graph = read_graph(Path(task.path))
    idle, begin = peak_resident_mib(), time.perf_counter()
    try:
        solution = solve_with_any(graph, task.budget_bytes, task.solver, task.limit_seconds, task.gap)
    except ValueError as error:
        return Outcome(status="refused", wall_seconds=time.perf_counter() - begin, remark=str(error))
    wall = time.perf_counter() - begin
    return _outcome(graph, task.budget_bytes, solution, wall, idle)


def _outcome(
    graph: Graph, budget_bytes: int, solution: Solution, wall_seconds: float, idle_mib: float | None
) -> Outcome:
    memory = peak_resident_mib()
    if solution.schedule is None:
        bound = None if solution.status == "infeasible" else solution.lower_bound_seconds
        return Outcome(
            status=solution.status,
            wall_seconds=wall_seconds,
            bound_seconds=bound,
            resident_mib=memory,
            idle_mib=idle_mib,
            remark="" if solution.shortage is None else solution.shortage.reason,
        )
    replayed = replay(graph, solution.schedule)
    assert replayed.peak_bytes <= budget_bytes
    return Outcome(
        status=solution.status,
        wall_seconds=wall_seconds,
        seconds=replayed.seconds,
        peak_bytes=replayed.peak_bytes,
        bound_seconds=solution.lower_bound_seconds,
        resident_mib=memory,
        idle_mib=idle_mib,
        remark=solution.solver,
    )


def peak_resident_mib() -> float | None:
    """Most memory of this process so far; None where there is no /proc.

    Not ``ru_maxrss``: on Linux it starts with what the process that started this one had in use.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    print(json.dumps(asdict(solve_here(Task(**json.loads(sys.argv[1]))))))
