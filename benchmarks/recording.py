"""What it costs to remember all that a second run sees: a step of ten blocks of about 2 ms, all of them recomputed."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

import planner
from benchmarks.reporting import RESULTS, write_result
from planner.runtime import dropped_stage
from profiler.recomputation.module_rerun import CallState
from profiler.workload.workload import Workload

BLOCKS, BLOCK_SECONDS, WIDTH = 10, 2e-3, 256


class Convolved(nn.Module):
    """A block of many small modules, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)]
        self.inner = nn.Sequential(*layers, nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True),
    "batchnorm": Convolved,
}


class Clock:
    """Adds up the seconds spent in some calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, clocked."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return run


@contextmanager
def clocked() -> Iterator[tuple[Clock, Clock]]:
    """Inside, clocks run while a first run is recorded, and while its state is put in place and taken back."""
    recording, reinstating = Clock(), Clock()
    init, reinstated, signature = CallState.__init__, CallState.reinstated, dropped_stage.signature_of

    @contextmanager
    def around(state: CallState) -> Iterator[None]:
        manager = reinstated(state)
        reinstating.around(manager.__enter__)()
        try:
            yield
        finally:
            reinstating.around(manager.__exit__)(None, None, None)

    CallState.__init__ = recording.around(init)  # type: ignore[method-assign]
    CallState.reinstated = around  # type: ignore[method-assign]
    dropped_stage.signature_of = recording.around(signature)
    try:
        yield recording, reinstating
    finally:
        CallState.__init__, CallState.reinstated = init, reinstated  # type: ignore[method-assign]
        dropped_stage.signature_of = signature


def step_of(kind: str) -> Workload:
    """Ten blocks, on as many sequences as take one of them about 2 ms."""
    torch.manual_seed(0)
    block, length = KINDS[kind](), 16
    while True:
        x = torch.randn(4, length, WIDTH)
        block(x)
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            block(x)
            seconds.append(time.perf_counter() - begin)
        if statistics.median(seconds) >= BLOCK_SECONDS:
            break
        length = int(1.25 * length)
    model = nn.Sequential(*[KINDS[kind]() for _ in range(BLOCKS)])
    return Workload(model=model, inputs=x, loss=lambda output: output.square().mean())


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for kind in KINDS:
        workload = step_of(kind)
        rule = planner.Rule(modules="*")
        stages = [str(k) for k in range(BLOCKS)]
        plan = planner.state(planner.profile(workload, stages=stages, menus=False), rule)
        assert sum(stage.decision == "recompute" for stage in plan.stages) == BLOCKS
        shares = []
        with planner.apply(workload.model, plan), clocked() as (recording, reinstating):
            workload.step()
            for _ in range(options.rounds):
                recording.seconds = reinstating.seconds = 0.0
                begin = time.perf_counter()
                workload.step()
                step_seconds = time.perf_counter() - begin
                shares.append((step_seconds, recording.seconds / step_seconds, reinstating.seconds / step_seconds))
        rows.append(
            {
                "block": kind,
                "modules_in_a_block": sum(1 for _ in workload.model.get_submodule("0").modules()),
                "step_seconds": statistics.median(seconds for seconds, _, _ in shares),
                "recording_share": statistics.median(share for _, share, _ in shares),
                "reinstating_share": statistics.median(share for _, _, share in shares),
            }
        )
    notes = [
        f"a step of {BLOCKS} blocks of about {1e3 * BLOCK_SECONDS:g} ms, all recomputed; medians of {options.rounds}",
        "recording: what first runs remember, and signatures of what they save",
        "reinstating: before and after second runs",
    ]
    write_result(options.out, "recording", "Remembering what a second run sees", pd.DataFrame(rows), notes)


if __name__ == "__main__":
    main()
