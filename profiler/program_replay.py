"""Replays the ops of a captured call in some order: the bytes that they keep and take, and their seconds."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from profiler.op_graph import StageOp, StageOps, StageStorage
from profiler.step_graph import SideReplay, StepGraph, StepRuns, replay_step, runs_once

_KINDS_NAMED = 3
# What tracing calls otherwise than eager code does.
_EAGER_NAMES = {"aten._native_batch_norm_legit_functional.default": "aten.native_batch_norm.default"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReplay:
    """An order of the runs of a call's ops, and what its replay says of it. Bytes are of what the ops make.

    Attributes:
        runs: the order.
        kept_bytes: the bytes that forward hands over to backward, beside its output, parameters and arguments.
        kept_output_bytes: the bytes of the output that backward reads.
        forward_peak_bytes: the most alive in forward.
        backward_peak_bytes: the most alive in backward: what was kept, gradients of what forward returned, what its
            ops make.
        above_start_bytes: the peak of backward above what is there as it begins, arguments included.
        arguments: numbers of the tensors among the arguments that backward reads.
        forward_seconds, backward_seconds: the time of the ops.
    """

    runs: StepRuns
    kept_bytes: int
    kept_output_bytes: int = 0
    forward_peak_bytes: int
    backward_peak_bytes: int
    above_start_bytes: int = 0
    arguments: frozenset[int] = frozenset()
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward together."""
        return self.forward_seconds + self.backward_seconds


def call_replay(
    graph: StepGraph,
    runs: StepRuns,
    *,
    gradients_held: bool = False,
    outputs_held: bool = False,
    argument_bytes: Mapping[int, int] = MappingProxyType({}),
    copied_gradient_bytes: int = 0,
) -> CallReplay:
    """The replay of an order of the runs of a call's ops.

    Args:
        graph: the graph of the call.
        runs: the order.
        gradients_held: others hold the gradients of what the call returned until its backward is over.
        outputs_held: others hold what it returned until then.
        argument_bytes: the size of the arguments that are freed when backward has read them.
        copied_gradient_bytes: by which more is alive while autograd copies gradients, when backward has made all.
    """
    replay = replay_step(graph, runs, gradients_held=gradients_held, outputs_held=outputs_held)
    sizes = [storage.size_bytes for storage in graph.storages] + [op.state_bytes for op in graph.ops]
    returned = {number for number, storage in enumerate(graph.storages) if storage.returned}
    forward_seconds, backward_seconds = (sum(graph.ops[ordinal].seconds for ordinal in side) for side in runs)
    return CallReplay(
        runs=runs,
        kept_bytes=sum(sizes[number] for number in replay.handed - returned),
        kept_output_bytes=sum(sizes[number] for number in replay.handed & returned),
        forward_peak_bytes=replay.forward.peak_bytes,
        backward_peak_bytes=replay.backward.peak_bytes,
        above_start_bytes=_above_start(graph, runs, replay.backward, argument_bytes, copied_gradient_bytes),
        arguments=frozenset(number for ordinal in runs.backward for number in graph.ops[ordinal].arguments),
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
    )


def _above_start(
    graph: StepGraph, runs: StepRuns, replay: SideReplay, argument_bytes: Mapping[int, int], copied_gradient_bytes: int
) -> int:
    """The peak of backward above what is there as it begins; an argument goes after the run that reads it last."""
    last = {n: place for place, ordinal in enumerate(runs.backward) for n in graph.ops[ordinal].arguments}
    above, gone_bytes = 0, 0
    for place, peak_bytes in enumerate(replay.peaks):
        above = max(above, peak_bytes - replay.start_bytes - gone_bytes)
        gone_bytes += sum(size for number, size in argument_bytes.items() if last.get(number) == place)
    return max(above, replay.end_bytes + copied_gradient_bytes - replay.start_bytes - gone_bytes)


@functools.lru_cache(maxsize=64)
def forward_flow(graph: StepGraph) -> StageOps:
    """The forward of a call as the ops of a stage, with the ordinals and numbers that they have in the graph."""
    ops = [op for op in graph.ops if op.side == "forward"]
    maker = {number: ordinal for ordinal, op in enumerate(ops) for number in op.makes}
    saved = replay_step(graph, runs_once(graph)).handed
    return StageOps(
        ops=tuple(
            StageOp(
                op=_EAGER_NAMES.get(op.op, op.op),
                module=op.module,
                seconds=op.seconds,
                reads=tuple((number, 0) for number in op.reads),
                allocates=op.makes,
                random=op.random,
                not_rerunnable_reason=op.once_reason,
            )
            for op in ops
        ),
        storages=tuple(
            StageStorage(
                size_bytes=storage.size_bytes,
                op=maker[number],
                saved=number in saved,
                returned=storage.returned,
            )
            for number, storage in enumerate(graph.storages)
            if number in maker
        ),
    )


@functools.lru_cache(maxsize=256)
def kept_and_rerun(graph: StepGraph, runs: StepRuns) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the storages that an order keeps of its forward, and the ops of the forward that it recomputes."""
    handed = replay_step(graph, runs).handed
    forward = {ordinal for ordinal, op in enumerate(graph.ops) if op.side == "forward"}
    made = {number for ordinal in forward for number in graph.ops[ordinal].makes}
    return tuple(sorted(handed & made)), tuple(sorted(forward.intersection(runs.again)))


def random_state_bytes(graph: StepGraph, runs: StepRuns) -> int:
    """Returns the bytes of the random states handed over to backward, where ops that draw from them are recomputed."""
    count = len(graph.storages)
    handed = replay_step(graph, runs).handed
    return sum(graph.ops[number - count].state_bytes for number in handed if number >= count)


def runs_with(graph: StepGraph, again: Collection[int]) -> StepRuns:
    """Returns the order that recomputes these ops of the forward, each once, just before backward first needs them.

    What they read is kept where they do not make it themselves.
    """
    once = runs_once(graph)
    maker = {number: ordinal for ordinal in again for number in graph.ops[ordinal].makes}
    backward: list[int] = []
    remade: set[int] = set()

    def remake(ordinal: int) -> None:
        for number in graph.ops[ordinal].reads:
            before = maker.get(number)
            if before is not None and before not in remade:
                remade.add(before)
                remake(before)
                backward.append(before)

    for ordinal in once.backward:
        remake(ordinal)
        backward.append(ordinal)
    return StepRuns(once.forward, tuple(backward))


def name_of_runs(graph: StepGraph, runs: StepRuns) -> str:
    """Returns a short name: how many ops are recomputed, and of which kinds, those of the most seconds first."""
    again = runs.again
    if not again:
        return "as a program"
    seconds: Counter[str] = Counter()
    for ordinal in again.elements():
        seconds[graph.ops[ordinal].kind] += graph.ops[ordinal].seconds  # type: ignore[assignment]  # a float will do
    kinds = sorted(seconds, key=lambda kind: (-seconds[kind], kind))
    more = ", ..." if len(kinds) > _KINDS_NAMED else ""
    return f"{', '.join(kinds[:_KINDS_NAMED])}{more} ({again.total()} ops)"
