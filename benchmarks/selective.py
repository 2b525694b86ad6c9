"""What running single ops again adds to a step, beside the seconds of those ops alone."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

import planner
from benchmarks.interleaving import in_turns
from benchmarks.recording import KINDS, Clock
from benchmarks.reporting import RESULTS, write_result
from profiler.recomputation.module_rerun import RERUN_DEPTH
from profiler.workload.workload import Workload

BLOCKS = 6
BLOCK_MILLISECONDS = (2, 8, 32)
# What running again costs little and frees much.
OPS = {
    "transformer": ("gelu", "relu", "native_layer_norm", "native_dropout"),
    "batchnorm": ("gelu", "native_batch_norm"),
}


class Gelu(nn.Module):
    """The block of a GPT, with the feed-forward network that most of its activations belong to."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@contextmanager
def clocked() -> Iterator[Clock]:
    """Inside, a clock runs while an op runs again."""
    clock = Clock()
    overload: Any = torch._ops.OpOverload
    call = overload.__call__

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not RERUN_DEPTH.get():
            return call(self, *args, **kwargs)
        begin = time.perf_counter()
        result = call(self, *args, **kwargs)
        clock.seconds += time.perf_counter() - begin
        return result

    overload.__call__ = run
    try:
        yield clock
    finally:
        overload.__call__ = call


def step_of(kind: str, milliseconds: float) -> Workload:
    """Blocks on as many sequences as take one of them so long."""
    torch.manual_seed(0)
    made = {**KINDS, "feed_forward": Gelu}[kind]
    block, length = made(), 16
    while True:
        x = torch.randn(4, length, 256)
        block(x)
        begin = time.perf_counter()
        for _ in range(5):
            block(x)
        if (time.perf_counter() - begin) / 5 >= milliseconds / 1000:
            break
        length = int(1.25 * length)
    model = nn.Sequential(*[made() for _ in range(BLOCKS)])
    return Workload(model=model, inputs=x, loss=lambda output: output.square().mean())


def row_of(kind: str, milliseconds: float, rounds: int) -> dict[str, Any]:
    """One step, plain and with some ops of each block run again, in turns."""
    workload = step_of(kind, milliseconds)
    ops = OPS.get(kind, ("gelu", "native_layer_norm"))
    stages = [str(k) for k in range(BLOCKS)]
    known = {op.kind for menu in planner.profile(workload, stages=stages).menus for op in menu.ops.ops}
    rules = [planner.Rule(modules="*", ops=op) for op in ops if op in known]
    plan = planner.state(planner.profile(workload, stages=stages, rules=rules), rules)
    plain, (planned,) = in_turns(workload, [plan], rounds)
    seconds = []
    with planner.apply(workload.model, plan), clocked() as clock:
        for _ in range(rounds):
            workload.zero_grad()
            clock.seconds = 0.0
            workload.step()
            seconds.append(clock.seconds)
    added = statistics.median(b - a for a, b in zip(plain, planned, strict=True))
    alone = statistics.median(seconds)
    return {
        "block": kind,
        "block_milliseconds": milliseconds,
        "plain_seconds": statistics.median(plain),
        "ops_again": plan.recomputed_ops,
        "added_seconds": added,
        "ops_seconds": alone,
        "added_over_ops": added / alone,
        "added_more_microseconds_per_op": 1e6 * (added - alone) / plan.recomputed_ops,
    }


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1, help="of torch: with one, others on the machine disturb less")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [row_of(kind, size, options.rounds) for size in BLOCK_MILLISECONDS for kind in (*KINDS, "feed_forward")]
    notes = [
        f"{BLOCKS} blocks, in each of which activations, norms and dropouts run again; {options.rounds} rounds",
        "added: the planned step less the plain one before it; ops: those that run again alone, clocked where they run",
    ]
    write_result(options.out, "selective", "What running single ops again adds", pd.DataFrame(rows), notes)


if __name__ == "__main__":
    main()
