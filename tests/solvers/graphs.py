"""Graphs for tests: hand-made ones and seeded random ones."""

from __future__ import annotations

import numpy as np

from solvers.problem.graph import Graph, Node


def training_graph(depth: int, size: int = 1) -> Graph:
    """``depth`` forward ops in a row, then their backwards, which read the forward's output and the gradient."""
    forward = [
        Node(name=f"f{k}", seconds=1.0, output_bytes=size, inputs=(f"f{k - 1}",) if k else ()) for k in range(depth)
    ]
    backward = [
        Node(
            name=f"b{k}",
            seconds=2.0,
            output_bytes=size,
            inputs=tuple(name for name in (f"f{k}", f"b{k + 1}" if k + 1 < depth else None) if name),
            side="backward",
        )
        for k in reversed(range(depth))
    ]
    return Graph(nodes=(*forward, *backward), outputs=("b0",))


def random_graph(seed: int, count: int | None = None) -> Graph:
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
