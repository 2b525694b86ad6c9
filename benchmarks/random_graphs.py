"""Random training steps as graph problems: branching forward passes with skip connections, mirrored by their backward.

The same seed gives the same graph on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solvers.problem.graph import Graph, Node

OPEN = 4  # forward outputs that wait for a first reader: branches side by side
LARGEST_BYTES = 2**27
SECONDS_PER_BYTE = 1e-9  # of an op that only moves its output; those with parameters take 2 to 20 times as long


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """One forward op; ``kind`` says what its backward reads: parameters (p), its inputs (i), or its output (o)."""

    inputs: tuple[int, ...]
    kind: str
    output_bytes: int
    seconds: float


def random_training_graph(count: int, seed: int) -> Graph:
    """A training step of ``count`` nodes: two fifths forward, as many backward, one fifth gradients of parameters.

    The gradient of an op's output reads the gradients of the op's readers, and what those saved: their inputs or their
    output. The gradient of its parameters reads the gradient of its output and its inputs. Sizes shrink threefold
    along the way and vary fourfold.

    >>> graph = random_training_graph(100, seed=1)
    >>> len(graph.nodes), len(graph.outputs), sum(node.side == "backward" for node in graph.nodes)
    (100, 22, 60)
    """
    if count < 10:
        raise ValueError(f"random_training_graph: expected a count of at least 10, got {count}; ask for more nodes")
    rng = np.random.default_rng(seed)
    forward = 2 * count // 5
    ops = _ops(rng, forward, with_parameters=count - 2 * forward)
    nodes = [_forward_node(ops, v) for v in range(forward)]
    for v in reversed(range(forward)):
        nodes.append(_output_gradient(ops, v))
        if ops[v].kind == "p":
            nodes.append(_parameter_gradient(rng, ops, v))
    gradients = [node.name for node in nodes if node.name.startswith("p")]
    return Graph(nodes=tuple(nodes), outputs=(f"f{forward - 1}", *gradients, "b0"))


def _ops(rng: np.random.Generator, count: int, with_parameters: int) -> list[_Op]:
    heavy = set(rng.choice(count, size=with_parameters, replace=False).tolist())
    ops: list[_Op] = []
    unread: list[int] = []
    for v in range(count):
        inputs = _inputs(rng, v, unread) if v < count - 1 else tuple(unread)
        unread = [*[u for u in unread if u not in inputs], v]
        kind = "p" if v in heavy else str(rng.choice(["i", "o"]))
        size = _kibibytes(LARGEST_BYTES * 3 ** (-v / count) * 4 ** rng.uniform(-1, 0))
        work = float(rng.uniform(2, 20)) if kind == "p" else 1.0
        ops.append(_Op(inputs=inputs, kind=kind, output_bytes=size, seconds=size * work * SECONDS_PER_BYTE))
    return ops


def _inputs(rng: np.random.Generator, v: int, unread: list[int]) -> tuple[int, ...]:
    """Mostly the newest output; at times one read before (a branch or a skip connection), or two that meet."""
    if not unread:
        return ()
    picked = {unread[-1]}
    if len(unread) >= OPEN or rng.random() < 0.2:
        picked.add(unread[int(rng.integers(len(unread)))])
        picked.add(unread[0])
    elif rng.random() < 0.2:
        other = int(rng.integers(max(0, v - 20), v))
        picked = {other} if rng.random() < 0.5 else picked | {other}
    return tuple(sorted(picked))


def _forward_node(ops: list[_Op], v: int) -> Node:
    op = ops[v]
    return Node(name=f"f{v}", seconds=_round(op.seconds), output_bytes=op.output_bytes, inputs=_names("f", op.inputs))


def _output_gradient(ops: list[_Op], v: int) -> Node:
    readers = [w for w in range(v + 1, len(ops)) if v in ops[w].inputs]
    saved = {u for w in readers if ops[w].kind == "i" for u in ops[w].inputs}
    saved |= {w for w in readers if ops[w].kind == "o"}
    if not readers:
        saved = {v}
    return Node(
        name=f"b{v}",
        seconds=_round(sum(ops[w].seconds for w in readers) or ops[v].seconds),
        output_bytes=ops[v].output_bytes,
        inputs=(*_names("f", sorted(saved)), *_names("b", readers)),
        side="backward",
    )


def _parameter_gradient(rng: np.random.Generator, ops: list[_Op], v: int) -> Node:
    return Node(
        name=f"p{v}",
        seconds=_round(ops[v].seconds),
        output_bytes=_kibibytes(2 ** rng.uniform(12, 24)),
        inputs=(*_names("f", ops[v].inputs), f"b{v}"),
        side="backward",
    )


def _names(letter: str, indices: tuple[int, ...] | list[int]) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in indices)


def _kibibytes(size: float) -> int:
    """Whole kibibytes: powers differ in their last bits from machine to machine."""
    return 1024 * round(size / 1024)


def _round(seconds: float) -> float:
    return float(f"{seconds:.3g}")


def random_tiny_graph(seed: int, count: int | None = None) -> Graph:
    """A random DAG of 3 to 8 nodes (or ``count``): small whole numbers, some without bytes, seconds or readers."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 9)) if count is None else count
    nodes = []
    for v in range(count):
        most = min(v, 3)
        picked = rng.choice(v, size=int(rng.integers(min(1, most), most + 1)), replace=False) if v else []
        nodes.append(
            Node(
                name=f"n{v}",
                seconds=float(rng.integers(0, 6)),
                output_bytes=int(rng.integers(0, 6)),
                transient_bytes=int(rng.integers(0, 3)),
                inputs=tuple(f"n{i}" for i in sorted(picked)),
                side="forward" if v < count // 2 else "backward",
            )
        )
    extra = [f"n{v}" for v in range(count - 1) if rng.random() < 0.15]
    return Graph(nodes=tuple(nodes), outputs=(*extra, f"n{count - 1}"), resident_bytes=int(rng.integers(0, 3)))
