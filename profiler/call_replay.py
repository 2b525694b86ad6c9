"""What running the ops of a captured call in some order keeps, takes and costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from profiler.step_graph import StepGraph
from profiler.step_replay import StepRuns, replay_step

_KINDS_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReplay:
    """An order of the runs of a call's ops, and what its replay says of it. Bytes are of what the ops make.

    Attributes:
        runs: the order.
        kept_bytes: what forward hands over to backward, beside what it returns, parameters and arguments.
        kept_output_bytes: of what forward returns, what backward reads.
        forward_peak_bytes: the most alive in forward.
        backward_peak_bytes: the most alive in backward: what was kept, gradients of what forward returned, what its
            ops make.
        backward_start_bytes: of these, what is there as backward begins.
        arguments: numbers of the tensors among the arguments that backward reads.
        forward_seconds, backward_seconds: of the ops.
    """

    runs: StepRuns
    kept_bytes: int
    kept_output_bytes: int = 0
    forward_peak_bytes: int
    backward_peak_bytes: int
    backward_start_bytes: int = 0
    arguments: frozenset[int] = frozenset()
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.forward_seconds + self.backward_seconds


def call_replay(graph: StepGraph, runs: StepRuns) -> CallReplay:
    """The replay of an order of the runs of a call's ops.

    Args:
        graph: of the call.
        runs: the order.
    """
    replay = replay_step(graph, runs, held=False)
    sizes = [storage.size_bytes for storage in graph.storages] + [op.state_bytes for op in graph.ops]
    returned = {number for number, storage in enumerate(graph.storages) if storage.returned}
    forward_seconds, backward_seconds = (sum(graph.ops[ordinal].seconds for ordinal in side) for side in runs)
    return CallReplay(
        runs=runs,
        kept_bytes=sum(sizes[number] for number in replay.handed - returned),
        kept_output_bytes=sum(sizes[number] for number in replay.handed & returned),
        forward_peak_bytes=replay.forward.peak_bytes,
        backward_peak_bytes=replay.backward.peak_bytes,
        backward_start_bytes=replay.backward.start_bytes,
        arguments=frozenset(number for ordinal in runs.backward for number in graph.ops[ordinal].arguments),
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
    )


def name_of_runs(graph: StepGraph, runs: StepRuns) -> str:
    """A short name: how many ops run again, and of which kinds, those of the most seconds first."""
    again = runs.again
    if not again:
        return "as a program"
    seconds: Counter[str] = Counter()
    for ordinal in again.elements():
        seconds[graph.ops[ordinal].kind] += graph.ops[ordinal].seconds  # type: ignore[assignment]  # a float will do
    kinds = sorted(seconds, key=lambda kind: (-seconds[kind], kind))
    more = ", ..." if len(kinds) > _KINDS_NAMED else ""
    return f"{', '.join(kinds[:_KINDS_NAMED])}{more} ({again.total()} ops)"
