"""Graphs for tests: hand-made ones and seeded random ones."""

from __future__ import annotations

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
