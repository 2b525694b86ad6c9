"""Small problems whose answers can be worked out by hand: what examples in docstrings start from."""

from __future__ import annotations

from solvers.problem.chain import Chain, Option, Stage
from solvers.problem.graph import Graph, Node


def equal_stages(count: int, offload_units: tuple[int, ...] = ()) -> Chain:
    """Stages that keep 4 bytes, hand on 1, and take 1 s forward and 2 s backward."""
    option = Option(
        forward_seconds=1,
        backward_seconds=2,
        kept_bytes=4,
        forward_peak_bytes=6,
        backward_peak_bytes=1,
        recompute_seconds=1,
        recompute_peak_bytes=4,
        offload_units=offload_units,
    )
    stage = Stage(name="unit", options=(option,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    return Chain(stages=(stage,) * count)


def late_reader() -> Graph:
    """Four nodes in a row, of which the last reads the first again; the first two outputs have 4 bytes, the others
    1."""
    a = Node(name="a", seconds=1.0, output_bytes=4)
    b = Node(name="b", seconds=2.0, output_bytes=4, inputs=("a",))
    c = Node(name="c", seconds=3.0, output_bytes=1, inputs=("b",))
    d = Node(name="d", seconds=1.0, output_bytes=1, inputs=("a", "c"))
    return Graph(nodes=(a, b, c, d), outputs=("d",))


def training_graph(depth: int, size_bytes: int = 1) -> Graph:
    """Forward nodes ``f0``, ``f1``, .. in a row; their backwards read their output and the gradient, in 2 s each."""
    forward = [
        Node(name=f"f{k}", seconds=1.0, output_bytes=size_bytes, inputs=(f"f{k - 1}",) if k else ())
        for k in range(depth)
    ]
    backward = [
        Node(
            name=f"b{k}",
            seconds=2.0,
            output_bytes=size_bytes,
            inputs=(f"f{k}", f"b{k + 1}") if k + 1 < depth else (f"f{k}",),
            side="backward",
        )
        for k in reversed(range(depth))
    ]
    return Graph(nodes=(*forward, *backward), outputs=("b0",))
