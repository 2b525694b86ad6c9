"""A Llama with a vocabulary of 128,000: plans in pieces beside plans without and a loss in chunks written by hand."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import planner
from benchmarks.one_step import peak_bytes_of, seconds_of
from benchmarks.pieces_models import llama
from benchmarks.reporting import MIB, RESULTS, result_name, write_rows
from planner.plans.solving import least_budget_bytes
from profiler.recomputation.heads import HeadInPieces
from profiler.workload.forward_patches import ForwardPatches
from profiler.workload.snapshot import preserved
from profiler.workload.workload import Workload

CHUNKS = 16
SHAPES = ((128_000, 256), (32_000, 768), (16_000, 128))  # words and width
ROWS = (16, 32, 64, 128, 256, 512)
_TOKENS = 1024


class ByHand(nn.Module):
    """A Llama whose loss is taken of sixteen parts of the tokens, each run again in backward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, **settings: Any) -> Tensor:
        """The mean loss of the next words."""
        hidden = self.model.model(input_ids=input_ids, **settings).last_hidden_state[:, :-1].flatten(0, 1)
        wanted = labels[:, 1:].flatten()
        parts = zip(hidden.chunk(CHUNKS), wanted.chunk(CHUNKS), strict=True)
        losses = [checkpoint(self._of_chunk, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / wanted.numel()  # pyright: ignore[reportArgumentType, reportCallIssue]

    def _of_chunk(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(self.model.lm_head(hidden), wanted, reduction="sum")


class Way(NamedTuple):
    """A way to take the step.

    Attributes:
        name: in the table.
        workload: whose step it is.
        inside: the context of its steps.
        budget_bytes: of its plan; 0 without one.
        predicted_peak_bytes: by its plan; 0 without one.
    """

    name: str
    workload: Workload
    inside: Callable[[], AbstractContextManager[Any]]
    budget_bytes: int = 0
    predicted_peak_bytes: int = 0


def ways_of(words: int, width: int) -> tuple[list[Way], int]:
    """Plans without and with pieces, and steps by hand; bytes of parameters, gradients and optimizer."""
    workload = llama(words=words, width=width, length=512)
    model = workload.model
    by_hand = Workload(model=ByHand(model), inputs=workload.inputs, optimizer=workload.optimizer)

    @contextmanager
    def checkpointed() -> Iterator[None]:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()  # type: ignore[operator]

    hands = [
        Way(f"by hand, {CHUNKS} chunks", by_hand, nullcontext),
        Way(f"by hand, {CHUNKS} chunks, layers checkpointed", by_hand, checkpointed),
    ]
    peaks = [_peak(way) for way in hands]
    profile = planner.profile(workload, numerics="rounding")
    without, least = least_budget_bytes(profile), min(map(least_budget_bytes, profile.in_pieces))

    def planned(name: str, budget_bytes: int, numerics: Any) -> Way:
        plan = planner.solve(profile, budget_bytes, numerics=numerics)
        return Way(name, workload, lambda: planner.apply(model, plan), budget_bytes, plan.predicted_peak_bytes)

    ways = [
        Way("no plan", workload, nullcontext),
        planned("recomputing, smallest budget", without, "eager"),
        planned("in pieces, smallest budget", least, "rounding"),
        planned("in pieces, smallest budget of recomputing", without, "rounding"),
    ]
    for way, peak in zip(hands, peaks, strict=True):
        ways += [way, planned(f"in pieces, at the peak of: {way.name}", max(peak, least), "rounding")]
    return ways, profile.states_bytes


def _peak(way: Way) -> int:
    with preserved(way.workload), way.inside():
        way.workload.step()
        return peak_bytes_of(way.workload)


def llama_rows(words: int, width: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each way, its steps in turns with those of the others."""
    torch.manual_seed(0)
    ways, states = ways_of(words, width)
    peaks = [_peak(way) for way in ways]
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, times in zip(ways, seconds, strict=True):
            with preserved(way.workload), way.inside():
                way.workload.step()
                times.append(seconds_of(way.workload))
    recomputing = next(k for k, way in enumerate(ways) if way.name.startswith("recomputing"))
    for k, way in enumerate(ways):
        ratios = [one / other for one, other in zip(seconds[k], seconds[recomputing], strict=True)]
        by_hand = [one / other for one, other in zip(seconds[k], seconds[k - 1], strict=True)] if k else []
        yield {
            "way": way.name,
            "budget_mib": way.budget_bytes / MIB or None,
            "peak_mib": peaks[k] / MIB,
            "beyond_states_mib": (peaks[k] - states) / MIB,
            "measured_minus_predicted_bytes": peaks[k] - way.predicted_peak_bytes if way.budget_bytes else None,
            "above_budget_bytes": max(0, peaks[k] - way.budget_bytes) if way.budget_bytes else None,
            "step_seconds": statistics.median(seconds[k]),
            "over_recomputing": statistics.median(ratios),
            "over_by_hand": statistics.median(by_hand) if "at the peak of" in way.name else None,
        }


def row_counts(shapes: Sequence[tuple[int, int]], rounds: int) -> Iterator[dict[str, Any]]:
    """A head and its loss, forward and backward: with so many rows at once beside all of them at once."""
    for words, width in shapes:
        torch.manual_seed(0)
        head = nn.Linear(width, words, bias=False)
        rows, wanted = torch.randn(_TOKENS, width, requires_grad=True), torch.randint(words, (_TOKENS,))
        model = nn.Sequential(head)
        workload = Workload(
            model=model, inputs=rows, loss=lambda logits, wanted=wanted: F.cross_entropy(logits, wanted)
        )
        seconds: dict[int, list[float]] = {count: [] for count in (_TOKENS, *ROWS)}
        peaks: dict[int, int] = {}
        for turn in range(rounds + 1):
            for count, times in seconds.items():
                with ExitStack() as stack:
                    patches = ForwardPatches(counts=False)
                    stack.callback(patches.remove)
                    if count < _TOKENS:
                        patches.wrap(head, HeadInPieces(head, count).wrapped, "it runs in pieces")
                    if turn:
                        times.append(seconds_of(workload))
                    else:
                        workload.step()  # What another way's output was held in is let go.
                        workload.zero_grad()
                        peaks[count] = peak_bytes_of(workload)
        weight_bytes = 4 * words * width
        for count, times in seconds.items():
            yield {
                "words": words,
                "width": width,
                "rows_at_once": count,
                "beyond_the_weight_and_its_gradient_mib": (peaks[count] - 2 * weight_bytes) / MIB,
                "over_all_at_once": statistics.median(
                    one / other for one, other in zip(times, seconds[_TOKENS], strict=True)
                ),
            }


def main() -> None:
    """Measure, print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--words", type=int, default=128_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = SHAPES if options.words == SHAPES[0][0] else ((options.words, options.width),)
    notes = [
        "medians of steps in turns; over recomputing: of ratios to the step at the smallest budget without pieces",
        "by hand: torch ops alone, the layers kept or under the model's own gradient checkpointing; where its peak is "
        "below the smallest budget in pieces, that is taken",
    ]
    with torch.device(options.device):
        rows = llama_rows(options.words, options.width, options.rounds)
        name = result_name("large-head", options.device)
        write_rows(options.out, name, "A Llama of four layers, 4 x 512 tokens", rows, lambda _: notes)
        write_rows(
            options.out,
            result_name("head-rows", options.device),
            f"Rows of a head that run at once, of {_TOKENS:,}",
            row_counts(shapes, options.rounds),
            lambda _: ["medians of ratios, in turns"],
        )


if __name__ == "__main__":
    main()
