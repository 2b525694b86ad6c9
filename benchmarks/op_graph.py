"""From a training step to a graph problem: the joint forward and backward pass, op by op, as torch traces it.

Every storage is counted once, at the op that makes it, and a view is no node: who reads a view reads the op that
owns its storage. Parameters, buffers, the batch, and what is written back into buffers are resident.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import GradAOTOutput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from profiler.measurement.captured_stages import costs_of
from profiler.trace.joint_graph import JointGraph, storages_of
from solvers.problem.graph import Graph, Node, Side

# What one op makes may be needed for different times: a gradient until the end, the statistics of a BatchNorm until
# its backward, its output until the next op. It is split in two where both parts are larger than this; else the large
# part decides: a small one that outlives it is resident, one that does not is kept as long. Without this, the gradients
# and statistics of every BatchNorm would add 114 nodes to the 400 of ResNet-50 to save 0.8 MB of 5.7 GB.
SPLIT_BYTES = 2**16
LEAST_SECONDS = 1e-6
RESIDENT = ""

_SHORT = (("native_", ""), ("_legit_functional", ""), ("convolution", "conv"), ("backward_data", "backward"))

Model = Callable[[], nn.Module]
Batch = Callable[[int], tuple[Tensor, Tensor]]


class Step(nn.Module):
    """A model and its cross entropy, as one module: ``(N, classes, ...)`` scores and ``(N, ...)`` targets to a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(inputs), target)


def capture(model: Model, batch: Batch, *, size: int, timed_size: int, split_bytes: int = SPLIT_BYTES) -> Graph:
    """The training step of a model at batch ``size`` as a graph problem.

    Bytes are those of batch ``size``, which is traced and never run. Seconds are measured at ``timed_size`` and scaled
    with the batch.

    Raises:
        ValueError: the two batch sizes give different ops.
    """
    large, small = trace(model, batch, size), trace(model, batch, timed_size)
    _check_same_ops(large, small)
    return build(large, scaled(op_seconds(small), large, small, size / timed_size), split_bytes)


def trace(model: Model, batch: Batch, size: int) -> JointGraph:
    """Trace forward and backward together, without data."""
    with FakeTensorMode(), contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, Step(model().train()), batch(size)).graph_module
    (output,) = joint.graph.find_nodes(op="output")
    of_forward = [each is not None and not isinstance(each, GradAOTOutput) for each in output.meta["desc"]]
    return JointGraph(joint, sum(of_forward))


def _check_same_ops(large: JointGraph, small: JointGraph) -> None:
    both = zip(large.module.graph.nodes, small.module.graph.nodes, strict=False)
    different = next((a for a, b in both if (a.name, a.target) != (b.name, b.target)), None)
    if different is not None or len(large.ops) != len(small.ops):
        raise ValueError(
            f"capture: expected the same ops at both batch sizes, got another at {different}; "
            "time it at a batch size closer to the problem's"
        )


def scaled(seconds: Mapping[str, float], large: JointGraph, small: JointGraph, ratio: float) -> dict[str, float]:
    """Seconds at the large batch: ``ratio`` times as many, except where an op touches nothing of the batch's size."""
    pairs = zip(large.ops, small.ops, strict=True)
    ratios = {a.name: ratio if _touched_bytes(a) != _touched_bytes(b) else 1.0 for a, b in pairs}
    return {name: ratios[name] * s for name, s in seconds.items()}


def _touched_bytes(op: fx.Node) -> list[list[int]]:
    return [[*storages_of(node).values()] for node in (op, *op.all_input_nodes)]


def op_seconds(graph: JointGraph) -> dict[str, float]:
    """Seconds per op by name, on one thread, whose shares other work on the machine disturbs less."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        costs = costs_of(graph, dict.fromkeys(graph.makers.values()), torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    return {op.name: cost.seconds for op, cost in costs.items()}


def build(graph: JointGraph, seconds: Mapping[str, float], split_bytes: int = SPLIT_BYTES) -> Graph:
    """The graph problem of a traced step, with the seconds of every op that makes something."""
    return _Builder(graph, seconds, split_bytes).problem()


class _Builder:
    """Goes through the ops in order and keeps, per storage, the node that owns it."""

    def __init__(self, graph: JointGraph, seconds: Mapping[str, float], split_bytes: int) -> None:
        self.graph = graph
        self.seconds = seconds
        self.split_bytes = split_bytes
        self.resident = _storages((*graph.inputs, *graph.constants, *graph.tangents))
        self.ends = _storages((*graph.returned, *graph.outputs[graph.forward_outputs :]))
        backward = [op for op in graph.ops if self.side(op) == "backward" and op.target is not operator.getitem]
        self.saved = {*_storages(node for op in backward for node in op.all_input_nodes)} - self.ends.keys()
        self.owner: dict[int, str] = dict.fromkeys([*self.resident, *_storages(graph.written)], RESIDENT)
        self.nodes: list[Node] = []
        self.outputs: list[str] = []
        self.wanted: list[str] = []
        self.extra_resident_bytes = 0
        self.count: Counter[str] = Counter()

    def problem(self) -> Graph:
        for op in self.graph.ops:
            self._add(op)
        return Graph(
            nodes=_needed(self.nodes, self.wanted),
            outputs=tuple(self.outputs),
            resident_bytes=sum(self.resident.values()) + self.extra_resident_bytes,
        )

    def side(self, op: fx.Node) -> Side:
        return "forward" if op in self.graph.forward_ops else "backward"

    def _add(self, op: fx.Node) -> None:
        made = {s: size for s, size in storages_of(op).items() if s not in self.owner}
        if not made:
            return
        read = _storages(op.all_input_nodes)
        node = Node(
            name=self._name(op),
            seconds=rounded(self.seconds[op.name]),
            output_bytes=sum(made.values()),
            inputs=tuple(dict.fromkeys(self.owner[s] for s in read if self.owner[s] != RESIDENT)),
            side=self.side(op),
        )
        self.owner.update(dict.fromkeys(made, node.name))
        place = len(self.nodes)
        ends = {s: size for s, size in made.items() if s in self.ends}
        node = self._part(node, ends, "end")
        if node.side == "forward":
            node = self._part(node, {s: size for s, size in made.items() if s in self.saved}, "saved")
        self.nodes.insert(place, node)
        holders = dict.fromkeys(self.owner[s] for s in ends if self.owner[s] != RESIDENT)
        self.outputs += holders
        self.wanted += [node.name, *holders] if ends else []

    def _part(self, node: Node, part: dict[int, int], suffix: str) -> Node:
        """Let a part of an op's storages outlive the rest; returns the op's node without that part.

        Where both are large, a second node takes the part over, directly after the op and without work.
        """
        part_bytes = sum(part.values())
        rest_bytes = node.output_bytes - part_bytes
        if not part or rest_bytes <= self.split_bytes:
            return node
        if part_bytes <= self.split_bytes:
            self.owner.update(dict.fromkeys(part, RESIDENT))
            self.extra_resident_bytes += part_bytes
            return replace(node, output_bytes=rest_bytes)
        name = f"{node.name}_{suffix}"
        taken = replace(
            node, name=name, seconds=LEAST_SECONDS, output_bytes=part_bytes, transient_bytes=0, inputs=(node.name,)
        )
        self.owner.update(dict.fromkeys(part, name))
        self.nodes.append(taken)
        return replace(node, output_bytes=rest_bytes, transient_bytes=node.transient_bytes + part_bytes)

    def _name(self, op: fx.Node) -> str:
        target = op.target
        assert isinstance(target, torch._ops.OpOverload)
        name = target.overloadpacket.__name__.strip("_")
        for long, short in _SHORT:
            name = name.replace(long, short)
        self.count[name] += 1
        return f"{name}{self.count[name]}"


def _needed(nodes: Sequence[Node], wanted: Iterable[str]) -> tuple[Node, ...]:
    """The wanted nodes and what they need, in the same order: what only serves an update of a buffer goes."""
    needed = set(wanted)
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.inputs)
    return tuple(node for node in nodes if node.name in needed)


def _storages(nodes: Iterable[Any]) -> dict[int, int]:
    """Numbers and bytes of every storage under what nodes make."""
    return {storage: size for node in nodes for storage, size in storages_of(node).items()}


def rounded(seconds: float) -> float:
    """Three significant digits, at least a microsecond."""
    seconds = max(seconds, LEAST_SECONDS)
    return round(seconds, 2 - math.floor(math.log10(seconds)))
