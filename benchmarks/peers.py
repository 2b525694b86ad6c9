"""Peers: torch's own ways to save activation memory against our plan at the same measured peak, timed in turns."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import planner
from benchmarks.fidelity import GPU_SETTINGS
from benchmarks.peer_methods import AOT_EAGER, INDUCTOR, SOLVERS, Peer, compiled_peers, eager_peers, missing
from benchmarks.peer_packages import package_peers
from benchmarks.peer_turns import in_turns, timed_step
from benchmarks.reporting import MIB, RESULTS, result_name, write_rows
from planner.zoo import build
from profiler.workload.snapshot import preserved

LAYERS = 12
LAYERED = ("gpt2", "bert", "llama", "vit")  # of the zoo's models those with layers to set
BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)
# Inductor compiles a model of 12 layers for about a minute: its default solver at three budgets.
INDUCTOR_SOLVERS = ("dp",)
INDUCTOR_BUDGETS = (0.1, 0.5, 0.9)


def rows_of(name: str, peers: Iterable[Peer], rounds: int, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per peer: its step, and ours under a plan that may use as much memory as it did."""
    ours = build(name, **settings)
    profile = planner.profile(ours)
    for peer in peers:
        theirs, planned = build(name, **settings), build(name, **settings)
        with peer.installed(theirs):
            peak = planner.measure(theirs, repeats=1).peak_bytes
            found = against(theirs, ours, planned, plan_within(profile, peak), rounds)
        head = {"model": name, "peer": peer.name, "backend": peer.backend, "setting": peer.setting}
        yield {**head, "peer_peak_MiB": peak / MIB, **found}


def plan_within(profile: planner.Profile, peak_bytes: int) -> planner.Plan | None:
    """Our plan with the peer's peak as its budget; None where there is none."""
    try:
        return planner.solve(profile, peak_bytes)
    except planner.Infeasible:
        return None


def against(
    theirs: planner.Workload, ours: planner.Workload, planned: planner.Workload, plan: planner.Plan | None, rounds: int
) -> dict[str, float | bool]:
    """Seconds of the peer's step, the plain eager one and that of a model with the plan, in turns, and its peak."""
    ways = {"plain": timed_step(ours), "peer": timed_step(theirs)}
    with contextlib.ExitStack() as applied:
        peak_bytes = math.nan
        if plan is not None:
            applied.enter_context(planner.apply(planned.model, plan))
            peak_bytes = planner.measure(planned, repeats=1).peak_bytes
            ways["plan"] = timed_step(planned)
        with preserved(theirs), preserved(ours), preserved(planned):
            times = in_turns(ways, rounds)
    return {
        "plan_peak_MiB": peak_bytes / MIB,
        "peer_seconds": times.median("peer"),
        "plan_seconds": math.nan if plan is None else times.median("plan"),
        "plan_over_peer": math.nan if plan is None else times.ratio("plan", "peer"),
        "peer_slowdown": times.ratio("peer", "plain"),
        "plan_slowdown": math.nan if plan is None else times.ratio("plan", "plain"),
        "plan_predicted_slowdown": math.nan if plan is None else plan.slowdown,
        "plan_gap": math.nan if plan is None else plan.gap,
        "plan_recomputed_ops": 0 if plan is None else plan.recomputed_ops,
    }


def settings_of(name: str, device: str, precision: str = "float32") -> dict[str, Any]:
    """The device, twelve layers where the zoo's model has layers, and sizes that keep a GPU busy on one."""
    sizes = GPU_SETTINGS[name] if device.startswith("cuda") else {}
    return {"device": device, "precision": precision, **sizes, **({"layers": LAYERS} if name in LAYERED else {})}


def fitting(name: str, peers: Iterable[Peer], settings: dict[str, Any]) -> tuple[list[Peer], list[str]]:
    """The peers that work on a model, and why the others do not."""
    workload = build(name, **settings)
    reasons = {peer: peer.unfit(workload) for peer in peers}
    notes = [f"{name}: {peer.name} not run: {why}" for peer, why in reasons.items() if why]
    return [peer for peer, why in reasons.items() if not why], list(dict.fromkeys(notes))


def summary(rows: list[dict[str, Any]], solvers: Iterable[str], left_out: Iterable[str] = ()) -> list[str]:
    """What the table says, and what is not in it."""
    known = [row for row in rows if not math.isnan(row["plan_over_peer"])]
    above = sum(row["plan_peak_MiB"] > row["peer_peak_MiB"] for row in known)
    faster = sum(row["plan_over_peer"] <= 1 for row in known)
    return [
        "every row: our plan, eager, solved for the peer's measured peak; plan_over_peer: median over rounds of "
        "peer and plan steps in turn, below 1 where ours is faster; slowdowns: over the plain eager step",
        f"rows: {len(rows)}; plans above their peer's peak: {above}; no plan fits (nan): {len(rows) - len(known)}; "
        f"ours faster or as fast: {faster} of {len(known)}",
        *left_out,
        *[f"solver {name}: not run, {package} is not installed" for name, package in missing(solvers).items()],
    ]


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt2"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=("float32", "bf16"))
    parser.add_argument("--inductor", action="store_true", help="peers that Inductor compiles, as a table of their own")
    parser.add_argument("--solvers", nargs="*", help=f"memory budget solvers: {', '.join(SOLVERS)}")
    parser.add_argument("--budgets", nargs="*", type=float, help="memory budgets from 0 to 1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    solvers = options.solvers if options.solvers is not None else INDUCTOR_SOLVERS if options.inductor else SOLVERS
    budgets = options.budgets if options.budgets is not None else INDUCTOR_BUDGETS if options.inductor else BUDGETS
    left_out: list[str] = []

    def all_rows() -> Iterator[dict[str, Any]]:
        for name in options.models:
            compiled = compiled_peers(INDUCTOR if options.inductor else AOT_EAGER, solvers, budgets)
            peers = compiled if options.inductor else [*eager_peers(), *package_peers(), *compiled]
            settings = settings_of(name, options.device, options.precision)
            fit, others = fitting(name, peers, settings)
            left_out.extend(others)
            yield from rows_of(name, fit, options.rounds, settings)

    title = "Our plans against Inductor's" if options.inductor else "Our plans against torch's own ways"
    notes = ["Inductor fuses ops into its own kernels; our plan runs eager"] if options.inductor else []
    base = "peers-inductor" if options.inductor else "peers"
    write_rows(
        options.out,
        result_name(base, options.device),
        title,
        all_rows(),
        lambda rows: [*notes, *summary(rows, solvers, left_out)],
    )


if __name__ == "__main__":
    main()
