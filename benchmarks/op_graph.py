"""From a training step to a graph problem: the joint forward and backward pass, op by op, as torch traces it.

Every storage is counted once, at the op that makes it, and a view is no node: who reads a view reads the op that
owns its storage. Parameters, buffers, the batch, and what is written back into buffers are resident.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree

from solvers.problem.graph import Graph, Node, Side

# What one op makes may be needed for different times: a gradient until the end, the statistics of a BatchNorm until
# its backward, its output until the next op. It is split in two where both parts are larger than this; else the large
# part decides: a small one that outlives it is resident, one that does not is kept as long. Without this, the gradients
# and statistics of every BatchNorm would add 114 nodes to the 400 of ResNet-50 to save 0.8 MB of 5.7 GB.
SPLIT_BYTES = 2**16
LEAST_SECONDS = 1e-6
RUNS = 3
RESIDENT = ""

_SHORT = (("native_", ""), ("_legit_functional", ""), ("convolution", "conv"), ("backward_data", "backward"))

Model = Callable[[], nn.Module]
Batch = Callable[[int], tuple[Tensor, Tensor]]


class Step(nn.Module):
    """A model and its cross entropy, as one module: ``(N, classes, ...)`` scores and ``(N, ...)`` targets to a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, target: Tensor) -> tuple[Tensor]:
        return (functional.cross_entropy(self.model(inputs), target),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A traced step: the ops, what they make (without computing it), and which storages matter at the end.

    Attributes:
        module: the joint graph; its inputs are parameters, buffers and the batch.
        arguments: names of the parameters and buffers that it takes, in order; the batch comes after them.
        values: what every fx node makes, as tensors without data.
        gradients: names of the fx nodes that are gradients of parameters.
        loss: name of the fx node that is the loss.
        updates: names of the fx nodes that are written back into buffers.
    """

    module: fx.GraphModule
    arguments: tuple[str, ...]
    values: Mapping[str, Any]
    gradients: tuple[str, ...]
    loss: str
    updates: tuple[str, ...]

    @property
    def ops(self) -> list[fx.Node]:
        return [node for node in self.module.graph.nodes if node.op == "call_function"]


def capture(model: Model, batch: Batch, *, size: int, timed_size: int, split_bytes: int = SPLIT_BYTES) -> Graph:
    """The training step of a model at batch ``size`` as a graph problem.

    Bytes are those of batch ``size``, which is traced and never run. Seconds are measured at ``timed_size`` and scaled
    with the batch.

    Raises:
        ValueError: the two batch sizes give different ops.
    """
    large, small = trace(model, batch, size), trace(model, batch, timed_size)
    _check_same_ops(large, small)
    seconds = op_seconds(small, Step(model().train()), batch(timed_size))
    return build(large, scaled(seconds, large, small, size / timed_size), split_bytes)


def trace(model: Model, batch: Batch, size: int) -> Trace:
    """Trace forward and backward together, without data; in-place updates become ops that return something new."""
    with FakeTensorMode():
        step, inputs = Step(model().train()), batch(size)
        module, signature = aot_export_module(step, inputs, trace_joint=True, output_loss_index=0)
        assert isinstance(module, fx.GraphModule) and signature.backward_signature is not None
        arguments = (*signature.parameters, *signature.buffers)
        return Trace(
            module=module,
            arguments=arguments,
            values=_values(module, _tensors_of(step, arguments) + inputs),
            gradients=tuple(signature.backward_signature.gradients_to_parameters),
            loss=signature.user_outputs[0],  # its loss_output names a buffer's update where there are any
            updates=tuple(signature.buffers_to_mutate),
        )


def _tensors_of(step: Step, names: Sequence[str]) -> tuple[Tensor, ...]:
    state = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    return tuple(state[name].detach() for name in names)


def _values(module: fx.GraphModule, arguments: Sequence[Tensor]) -> dict[str, Any]:
    """What every fx node makes; all alive together, so that no two storages share an address."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*arguments)
    return {node.name: value for node, value in interpreter.env.items()}


def _check_same_ops(large: Trace, small: Trace) -> None:
    both = zip(large.module.graph.nodes, small.module.graph.nodes, strict=False)
    different = next((a for a, b in both if (a.name, a.target) != (b.name, b.target)), None)
    if different is not None or len(large.ops) != len(small.ops):
        raise ValueError(
            f"capture: expected the same ops at both batch sizes, got another at {different}; "
            "time it at a batch size closer to the problem's"
        )


def scaled(seconds: Mapping[str, float], large: Trace, small: Trace, ratio: float) -> dict[str, float]:
    """Seconds at the large batch: ``ratio`` times as many, except where an op touches nothing of the batch's size."""
    pairs = zip(large.ops, small.ops, strict=True)
    ratios = {a.name: ratio if _touched(large, a) != _touched(small, b) else 1.0 for a, b in pairs}
    return {name: ratios[name] * s for name, s in seconds.items()}


def _touched(traced: Trace, op: fx.Node) -> list[torch.Size]:
    values = [traced.values[node.name] for node in (op, *op.all_input_nodes)]
    return [tensor.shape for tensor in _tensors(values)]


class _Timer(fx.Interpreter):
    """Runs a graph and notes the seconds of every op."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, list[float]] = {}

    def run_node(self, n: fx.Node) -> Any:
        begin = time.thread_time()
        value = super().run_node(n)
        self.seconds.setdefault(n.name, []).append(time.thread_time() - begin)
        return value


def op_seconds(traced: Trace, step: Step, inputs: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Median seconds per op over three runs after one to warm up.

    On one thread and in seconds of that thread's processor time, which other work on the machine hardly disturbs.
    """
    threads = torch.get_num_threads()
    timer = _Timer(traced.module)
    arguments = _tensors_of(step, traced.arguments) + inputs
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for _ in range(RUNS + 1):
                timer.run(*arguments)
    finally:
        torch.set_num_threads(threads)
    return {op.name: statistics.median(timer.seconds[op.name][1:]) for op in traced.ops}


def build(traced: Trace, seconds: Mapping[str, float], split_bytes: int = SPLIT_BYTES) -> Graph:
    """The graph problem of a trace, with the seconds of every fx node."""
    return _Builder(traced, seconds, split_bytes).graph()


class _Builder:
    """Goes through the ops in order and keeps, per storage, the node that owns it."""

    def __init__(self, traced: Trace, seconds: Mapping[str, float], split_bytes: int) -> None:
        self.traced = traced
        self.seconds = seconds
        self.split_bytes = split_bytes
        values = traced.values
        resident = [values[node.name] for node in traced.module.graph.nodes if node.op in ("placeholder", "get_attr")]
        self.resident = _storages(resident)
        self.updates = set(_storages([values[name] for name in traced.updates]))
        self.ends = set(_storages([values[name] for name in (traced.loss, *traced.gradients)]))
        self.saved = _read_in_backward(traced) - self.ends
        self.owner: dict[int, str] = dict.fromkeys([*self.resident, *self.updates], RESIDENT)
        self.nodes: list[Node] = []
        self.outputs: list[str] = []
        self.wanted: list[str] = []
        self.extra_resident_bytes = 0
        self.count: Counter[str] = Counter()
        self.side: Side = "forward"

    def graph(self) -> Graph:
        for op in self.traced.ops:
            self._add(op)
            if op.name == self.traced.loss:
                self.side = "backward"
        return Graph(
            nodes=_needed(self.nodes, self.wanted),
            outputs=tuple(self.outputs),
            resident_bytes=sum(self.resident.values()) + self.extra_resident_bytes,
        )

    def _add(self, op: fx.Node) -> None:
        made = {s: size for s, size in _storages([self.traced.values[op.name]]).items() if s not in self.owner}
        if not made:
            return
        read = _storages([self.traced.values[node.name] for node in op.all_input_nodes])
        node = Node(
            name=self._name(op),
            seconds=rounded(self.seconds[op.name]),
            output_bytes=sum(made.values()),
            inputs=tuple(dict.fromkeys(self.owner[s] for s in read if self.owner[s] != RESIDENT)),
            side=self.side,
        )
        self.owner.update(dict.fromkeys(made, node.name))
        place = len(self.nodes)
        ends = {s: size for s, size in made.items() if s in self.ends}
        node = self._part(node, ends, "end")
        if self.side == "forward":
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


def _read_in_backward(traced: Trace) -> set[int]:
    names = [op.name for op in traced.ops]
    backward = traced.ops[names.index(traced.loss) + 1 :]
    return set(_storages([traced.values[node.name] for op in backward for node in op.all_input_nodes]))


def _needed(nodes: Sequence[Node], wanted: Iterable[str]) -> tuple[Node, ...]:
    """The wanted nodes and what they need, in the same order: what only serves an update of a buffer goes."""
    needed = set(wanted)
    for node in reversed(nodes):
        if node.name in needed:
            needed.update(node.inputs)
    return tuple(node for node in nodes if node.name in needed)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _storages(value: Any) -> dict[int, int]:
    """Address and bytes of every storage under the tensors in a value."""
    storages = [tensor.untyped_storage() for tensor in _tensors(value)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def rounded(seconds: float) -> float:
    """Three significant digits, at least a microsecond."""
    seconds = max(seconds, LEAST_SECONDS)
    return round(seconds, 2 - math.floor(math.log10(seconds)))
