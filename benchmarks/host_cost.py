"""Host cost: the time of steps under plans and ``torch.utils.checkpoint`` where kernels take hardly any."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import planner
from benchmarks.budgets import smallest_budget
from benchmarks.reporting import RESULTS, result_name, write_rows
from profiler.workload.workload import Workload

BLOCKS, WIDTH, HEADS, BATCH, LENGTH, VOCABULARY = 12, 16, 2, 4, 16, 32


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*split.unbind(), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.other_norm(x))))


class TinyGPT(nn.Module):
    """A GPT whose ops take as long as calling them; ``run`` calls its blocks."""

    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.run is None else self.run(block, x)
        return self.head(self.norm(x)).square().mean()


def _checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    result = checkpoint(block, x, use_reentrant=False)
    assert isinstance(result, Tensor)
    return result


def workload(device: str, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> Workload:
    """A step on a few short sequences."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH)).to(device)
    return Workload(model=TinyGPT(run).to(device), inputs=tokens, loss=lambda output: output)


def seconds_of(work: Workload) -> float:
    """Of a step in a loop as people write it."""
    tokens, begin = work.inputs, time.perf_counter()
    work.model(tokens).backward()
    work.model.zero_grad()
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return time.perf_counter() - begin


def planned_ways(device: str) -> Iterator[tuple[str, Workload, int]]:
    """Ways to run the step under a plan, and how many ops run again; the plan is on."""
    names = [f"blocks.{k}" for k in range(BLOCKS)]
    for way in ("keep all", "recompute all", "half of the range"):
        work = workload(device)
        profile = planner.profile(work, stages=names if way == "recompute all" else None)
        if way == "recompute all":
            plan = planner.state(profile, planner.Rule(modules="blocks.*"))
            assert sum(stage.decision == "recompute" for stage in plan.stages) == BLOCKS
        else:
            smallest, most = smallest_budget(profile), profile.unplanned_peak_bytes
            plan = planner.solve(profile, most if way == "keep all" else (smallest + most) // 2)
        planner.apply(work.model, plan)
        yield way, work, plan.recomputed_ops


def rows_of(rounds: int, device: str) -> Iterator[dict[str, Any]]:
    """A row for each way: medians of the ratios to the plain step and to the checkpointed one of the same round."""
    ways = [("plain", workload(device), 0)]
    ways += [("torch.utils.checkpoint, each block", workload(device, _checkpointed), 0), *planned_ways(device)]
    seconds: dict[str, list[float]] = {way: [] for way, _, _ in ways}
    for work in (work for _, work, _ in ways for _ in range(20)):
        seconds_of(work)
    for _ in range(rounds):
        for way, work, _ in ways:
            seconds[way].append(seconds_of(work))
    plain, by_hand = seconds["plain"], seconds["torch.utils.checkpoint, each block"]
    for way, _, ops in ways:
        yield {
            "way": way,
            "recomputed_ops": ops,
            "step_seconds": statistics.median(seconds[way]),
            "over_plain": statistics.median(a / b for a, b in zip(seconds[way], plain, strict=True)),
            "over_checkpoint": statistics.median(a / b for a, b in zip(seconds[way], by_hand, strict=True)),
        }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    notes = [
        f"{BLOCKS} GPT blocks of width {WIDTH}, {BATCH} sequences of {LENGTH} tokens, one thread: hardly any time "
        "in kernels",
        f"medians of {options.rounds} rounds, in each of which every way runs once; ratios within a round",
    ]
    name, rows = result_name("host-cost", options.device), rows_of(options.rounds, options.device)
    write_rows(options.out, name, "Host cost of plans", rows, lambda _: notes)


if __name__ == "__main__":
    main()
