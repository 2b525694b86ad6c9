"""Why the peak is what has to be planned: two budgets of something else, on steps whose peaks are known.

``shares``: a share of what a compiled model saves for backward (``activation_memory_budget``), from all to nothing, and
the peak that each gives; beside it a plan of ours with that peak as its budget (pytorch/pytorch#197838).

``boundaries``: a Llama of 24 layers on 32,768 tokens, estimated for an H100, with every block recomputed, and with the
inputs of the blocks in host memory as well (huggingface/accelerate#4175 has such a step); beside them our plans.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import planner
from benchmarks.peer_methods import AOT_EAGER, compiled_peers
from benchmarks.peers import plan_within, settings_of
from benchmarks.reporting import MIB, RESULTS, write_rows
from planner.plans.cost_model import chain_of
from planner.zoo import build
from solvers import Action, Chain, Schedule, replay
from solvers.chain.baselines import recompute_all
from solvers.problem.chain import Link

MODELS = ("gpt2", "bert", "llama")
SHARES = tuple(tenths / 10 for tenths in range(10, -1, -1))
SOLVER = "dp"  # the default of torch's five
SHAPES = {
    "0.6 billion parameters, 32,768 tokens": {"layers": 24, "hidden": 1024, "batch": 8, "seq": 4096, "vocab": 151936},
    "5 billion parameters, 2,048 tokens": {"layers": 24, "hidden": 4096, "batch": 1, "seq": 2048, "vocab": 32000},
}


def rows_of_shares(models: list[str], settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each share of the saved bytes: the peak that it gives, and the plan that may use as much."""
    for name in models:
        own = {**settings_of(name, "cpu"), **settings}
        profile = planner.profile(build(name, **own))
        plain, *budgets = compiled_peers(AOT_EAGER, [SOLVER], SHARES[1:])
        for share, peer in zip(SHARES, [plain, *budgets], strict=True):
            theirs, ours = build(name, **own), build(name, **own)
            with peer.installed(theirs):
                peak_bytes = planner.measure(theirs, repeats=1).peak_bytes
            plan = plan_within(profile, peak_bytes)
            row = {"model": name, "share_of_saved_bytes": share, "peak_bytes": peak_bytes}
            if plan is not None:
                with planner.apply(ours.model, plan):
                    measured_bytes = planner.measure(ours, repeats=1).peak_bytes
                row |= {"our_predicted_bytes": plan.predicted_peak_bytes, "our_peak_bytes": measured_bytes}
                row |= {"our_slowdown": plan.slowdown}
            yield row


def notes_on_shares(rows: list[dict[str, Any]]) -> list[str]:
    """How often a smaller share has a higher peak, and whether ours are within their budgets."""
    rises, above = 0, sum(row.get("our_peak_bytes", 0) > row["peak_bytes"] for row in rows)
    for before, after in itertools.pairwise(rows):
        rises += before["model"] == after["model"] and after["peak_bytes"] > before["peak_bytes"]
    exact = sum(row.get("our_peak_bytes") == row.get("our_predicted_bytes") for row in rows if "our_peak_bytes" in row)
    return [
        f"activation_memory_budget with solver {SOLVER}, compiled by {AOT_EAGER}",
        f"a smaller share with a higher peak: {rises} of {len(rows) - len({row['model'] for row in rows})} steps down",
        f"our plans: {exact} of {len(rows)} as predicted to the byte, {above} above their budget",
    ]


def llama(layers: int, hidden: int, batch: int, seq: int, vocab: int) -> planner.Workload:
    """A Llama in bfloat16 with AdamW, on the device at hand."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, hidden // 64)
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "vocab_size": vocab,
    }
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2), use_cache=False)
    model: Any = LlamaForCausalLM(config)
    model.to("cuda", torch.bfloat16)
    tokens = torch.randint(vocab, (batch, seq), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return planner.Workload(model, {"input_ids": tokens, "labels": tokens}, optimizer=optimizer)


def rows_of_boundaries(name: str, shape: dict[str, int], device: str) -> Iterator[dict[str, Any]]:
    """Each way with the head as the model has it, and with the head and the loss a few rows at a time."""
    profile = planner.estimate(functools.partial(llama, **shape), device=device, numerics="rounding")
    for head, found in (("whole", profile), *(("in pieces", each) for each in profile.in_pieces[-1:])):
        for row in _ways(found, profile.unplanned_seconds):
            yield {"model": name, "head": head, **row}


def _ways(profile: planner.Profile, plain_seconds: float) -> Iterator[dict[str, Any]]:
    chain, link = chain_of(profile), _link_of(profile)
    outside_seconds = profile.unplanned_seconds - chain.unplanned_seconds

    def row(way: str, peak_bytes: int, seconds: float, host_bytes: int = 0) -> dict[str, Any]:
        over = seconds / plain_seconds
        return {
            "way": way,
            "peak_MiB": peak_bytes / MIB,
            "over_plain": over,
            "host_MiB": host_bytes / MIB,
        }

    yield row("everything kept", profile.unplanned_peak_bytes, profile.unplanned_seconds)
    recomputed = recompute_all(chain)[0]
    sent = with_inputs_sent(chain, recomputed)
    peaks = []
    for way, schedule in (("every block recomputed", recomputed), ("and its input in host memory", sent)):
        found = replay(chain, schedule, link)
        peaks.append(found.peak_bytes)
        yield row(way, found.peak_bytes, found.seconds + outside_seconds, found.host_peak_bytes)
    at_same = planner.solve(profile, peaks[0])
    yield row("ours, at the peak of every block", at_same.predicted_peak_bytes, at_same.predicted_seconds)
    at_same = planner.solve(profile, peaks[1], offload="auto")
    yield row("ours, at the peak with inputs in host memory", at_same.predicted_peak_bytes, at_same.predicted_seconds)


def _link_of(profile: planner.Profile) -> Link:
    assert profile.link is not None
    rates = profile.link.to_host_bytes_per_second, profile.link.to_device_bytes_per_second
    return Link(to_host_bytes_per_second=rates[0], to_device_bytes_per_second=rates[1])


def with_inputs_sent(chain: Chain, schedule: Schedule) -> Schedule:
    """The schedule with the inputs of recomputed stages in host memory, but for the last one's.

    Each is sent once its stage has run, and comes back as the stage after it runs again.
    """
    dropped = [a.stage for a in schedule.actions if a.kind == "forward" and a.option is None]
    sent = [k for k in dropped[:-1] if chain.stages[k].offload_units]
    after = dict(itertools.pairwise(dropped))

    def copies(kind: Any, k: int) -> list[Action]:
        return [Action(kind, k, unit) for unit in range(len(chain.stages[k].offload_units))]

    actions: list[Action] = []
    for action in schedule.actions:
        if action.kind == "recompute":
            actions += [copy for k in sent if after[k] == action.stage for copy in copies("fetch", k)]
        actions.append(action)
        if action.kind == "forward" and action.option is None:
            actions += [copy for k in sent if after[k] == action.stage for copy in copies("release", k)]
            actions += copies("send", action.stage) if action.stage in sent else []
    return Schedule(actions=tuple(actions))


def notes_on_boundaries(rows: list[dict[str, Any]]) -> list[str]:
    """What is compared."""
    return [
        "estimated, nothing ran: bytes as the device's allocator counts them, seconds of the data sheet as ratios",
        "everything in bfloat16, AdamW in one kernel; over_plain: of the step that keeps everything, its head whole",
    ]


def main() -> None:
    """Measure or estimate, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", nargs="+", choices=("shares", "boundaries"), default=["shares", "boundaries"])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--device", default="h100", help="for boundaries: a card")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if "shares" in options.part:
        small = {"layers": 2, "hidden": 32} if options.tiny else {}
        title = "Peaks of shares of the saved bytes, and of plans with these peaks as budgets"
        rows = rows_of_shares(options.models, small)
        write_rows(options.out, "true-peak-shares", title, rows, notes_on_shares)
    if "boundaries" in options.part:
        tiny = {"tiny": {"layers": 4, "hidden": 64, "batch": 2, "seq": 128, "vocab": 512}}
        title = "Inputs of recomputed blocks in host memory"
        shapes = (tiny if options.tiny else SHAPES).items()
        rows = (row for name, shape in shapes for row in rows_of_boundaries(name, shape, options.device))
        write_rows(options.out, "true-peak-boundaries", title, rows, notes_on_boundaries)


if __name__ == "__main__":
    main()
