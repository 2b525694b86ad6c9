"""Offload: predicted against measured over links of many speeds, and joint plans against either way alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import planner
from benchmarks.budgets import smallest_budget
from benchmarks.peer_turns import in_turns, timed_step
from benchmarks.reporting import MIB, RESULTS, result_name, write_result
from benchmarks.simulated_gpu import on_gpu, repeated
from planner.plans.cost_model import chain_of
from planner.zoo import build
from profiler.json_files import write_document
from profiler.workload.snapshot import preserved
from solvers import Chain, Link, Problem, Solution, solve_chain

GBPS = (0.02, 0.2, 1.0, 5.0, 25.0)
PLACES = (0.8, 0.5, 0.2)  # between the smallest budget of plans that send nothing and the unplanned peak
MODELS: dict[str, dict[str, Any]] = {"gpt2": {"layers": 6}, "vit": {"layers": 6}, "resnet50": {}}

# The simulated transformer is BERT-Large: its blocks measured under bfloat16 autocast on one sequence, 24 of them, for
# 16 sequences, as fast as a V100 with 32 GB trains it unplanned: 23.94 sentences/s with 18 sequences, Adam and AMP
# (documentation of PaddlePaddle Fleet, Recompute-Offload).
SIMULATED: dict[str, Any] = {"hidden": 1024, "heads": 16, "seq": 512, "vocab": 30522, "batch": 1, "layers": 3}
BLOCKS, SEQUENCES, SENTENCES_PER_SECOND = 24, 16, 23.94
SIMULATED_LINKS = (6.0, 12.0, 25.0, 50.0)
PROBLEM = Path(__file__).parent / "chains" / "bert-large-v100.json"


def measured_rows(name: str, device: str, rounds: int, gbps: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """One row per budget and link: what the joint plan predicts, and what is measured of it."""
    workload = build(name, device=device, **MODELS[name])
    profile = planner.profile(workload)
    links = [planner.Offload(link_gbps=rate) for rate in gbps] if profile.link is None else [planner.Offload()]
    low, high = smallest_budget(profile), profile.unplanned_peak_bytes
    for place in PLACES:
        budget = int(low + place * (high - low))
        for link in links:
            yield measured_row(name, workload, planner.solve(profile, budget, offload=link), place, rounds)


def measured_row(
    name: str, workload: planner.Workload, plan: planner.Plan, place: float, rounds: int
) -> dict[str, Any]:
    """One plan, applied."""
    with planner.apply(workload.model, plan):
        peak = planner.measure(workload, repeats=1).peak_bytes
    with preserved(workload):
        times = in_turns({"plain": timed_step(workload), "planned": timed_step(workload, plan)}, rounds)
    return {
        "model": name,
        "place": place,
        "budget_MiB": plan.budget_bytes / MIB,
        "link_GBps": plan.link.to_host_bytes_per_second / 1e9 if plan.link else 0.0,
        "sent_MiB": sum(stage.offloaded_bytes for stage in plan.stages) / MIB,
        "host_MiB": plan.host_bytes / MIB,
        "recomputed_ops": plan.recomputed_ops,
        "stall_ms": plan.stall_seconds * 1e3,
        "predicted_peak_MiB": plan.predicted_peak_bytes / MIB,
        "measured_peak_MiB": peak / MIB,
        "error_percent": 100 * abs(plan.predicted_peak_bytes - peak) / peak,
        "over_budget": peak > plan.budget_bytes,
        "predicted_slowdown": plan.slowdown,
        "measured_slowdown": times.ratio("planned", "plain"),
    }


def simulated_chain() -> Chain:
    """Profile three blocks here, repeat the one in the middle, and scale the chain to the GPU."""
    workload = build("bert", **SIMULATED)
    workload.autocast = torch.bfloat16
    profile = planner.profile(workload, stages=["bert.encoder.layer.*"])
    middle = next(k for k, record in enumerate(profile.stages) if record.name == "bert.encoder.layer.1")
    chain = repeated(chain_of(profile), middle, BLOCKS - SIMULATED["layers"] + 1)
    return on_gpu(chain, batch=SEQUENCES, seconds=SEQUENCES / SENTENCES_PER_SECOND)


def simulated_rows(chain: Chain) -> Iterator[dict[str, Any]]:
    """One row per granularity, budget and link: the extra seconds of each way."""
    whole = chain.without_menus()
    peak = solve_chain(Problem(chain=chain, budget_bytes=2**62), "keep_all").peak_bytes
    assert peak is not None
    for level, variant in (("whole stages", whole), ("op level", chain)):
        for share in (0.7, 0.5, 0.4):
            budget = int(share * peak)
            alone = solve_chain(Problem(chain=variant, budget_bytes=budget))
            for rate in SIMULATED_LINKS:
                link = Link(to_host_bytes_per_second=rate * 1e9, to_device_bytes_per_second=rate * 1e9)
                problem = Problem(chain=variant, budget_bytes=budget, link=link)
                found = {"offload": solve_chain(problem, "offload_only"), "joint": solve_chain(problem)}
                yield simulated_row(level, share, rate, variant.unplanned_seconds, alone, found)


def simulated_row(
    level: str, share: float, rate: float, plain: float, alone: Solution, found: dict[str, Solution]
) -> dict[str, Any]:
    """Extra seconds in percent of the plain step."""

    def extra(solution: Solution) -> float:
        return float("nan") if solution.seconds is None else 100 * (solution.seconds / plain - 1)

    return {
        "level": level,
        "budget_percent": 100 * share,
        "link_GBps": rate,
        "recompute_only_extra_percent": extra(alone),
        "offload_only_extra_percent": extra(found["offload"]),
        "joint_extra_percent": extra(found["joint"]),
        "removed_percent_of_recompute_s_extra": 100 * (1 - extra(found["joint"]) / extra(alone)),
        "bound_extra_percent": 100 * (found["joint"].lower_bound_seconds / plain - 1),
        "solve_seconds": found["joint"].solve_seconds,
    }


def main() -> None:
    """Measure or simulate, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulated", action="store_true", help="solve the simulated transformer's problem file")
    parser.add_argument("--profile-again", action="store_true", help="make that file first (minutes)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.profile_again:
        write_document(PROBLEM, simulated_chain().to_dict())
    if options.simulated:
        frame = pd.DataFrame(simulated_rows(simulated_problem()))
        worst = frame[["joint_extra_percent", "recompute_only_extra_percent", "offload_only_extra_percent"]]
        never = bool((worst.iloc[:, 0] <= worst.iloc[:, 1:].min(axis=1) + 1e-9).all())
        notes = [f"problem: benchmarks/chains/{PROBLEM.name}", f"joint never slower than either alone: {never}"]
        write_result(options.out, "offload-simulated", "BERT-Large on a simulated V100", frame, notes)
        return
    rows = [row for name in options.models for row in measured_rows(name, options.device, options.rounds, GBPS)]
    notes = [
        f"rows: {len(rows)}; with a peak above the budget: {sum(row['over_budget'] for row in rows)}; largest "
        f"|predicted - measured| of a peak: {max(row['error_percent'] for row in rows):.4f} % of measured",
        "place: from the smallest budget of plans that send nothing (0) to the unplanned peak (1)",
        "slowdowns are of the whole step: medians over rounds of plain and planned steps in turn",
        *(["the link is an artificial one of the speed given"] if options.device == "cpu" else []),
    ]
    frame = pd.DataFrame(rows)
    write_result(options.out, result_name("offload", options.device), "Offload: predicted and measured", frame, notes)


def simulated_problem() -> Chain:
    """The simulated transformer's chain as its file has it."""
    return Chain.from_dict(json.loads(PROBLEM.read_text()))


if __name__ == "__main__":
    main()
