"""The replay of a graph's schedule: its memory timeline and seconds, or the first action that is impossible."""

from __future__ import annotations

from dataclasses import dataclass

from solvers.problem.graph import Graph, GraphAction, GraphSchedule


class GraphReplayError(ValueError):
    """A schedule that does not run: the first violation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedGraphAction:
    """One action carried out: the most bytes alive during it, those alive after it, and its seconds."""

    action: GraphAction
    peak_bytes: int
    alive_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReplay:
    """What a schedule does: the memory timeline, its peak and where it stands, seconds, and how often nodes run."""

    timeline: tuple[ReplayedGraphAction, ...]
    peak_bytes: int
    peak_moment: ReplayedGraphAction
    seconds: float
    runs: tuple[int, ...]


def replay_graph(graph: Graph, schedule: GraphSchedule) -> GraphReplay:
    """Carry out a schedule; resident bytes are included in every number of bytes.

    Raises:
        GraphReplayError: an input is not alive, something alive is run again, something dead is freed, a node's
            first run is out of order or missing, one that must run once runs again, or an output is not alive at the
            end.

    >>> from solvers.problem.graph import Node
    >>> a = Node(name="a", seconds=1.0, output_bytes=4, transient_bytes=3)
    >>> graph = Graph(nodes=(a, Node(name="b", seconds=2.0, output_bytes=1, inputs=("a",))), outputs=("b",))
    >>> run = [GraphAction("compute", 0), GraphAction("compute", 1), GraphAction("free", 0)]
    >>> [entry.peak_bytes for entry in replay_graph(graph, GraphSchedule(tuple(run))).timeline]
    [7, 5, 5]
    """
    index = {node.name: i for i, node in enumerate(graph.nodes)}
    alive: set[int] = set()
    runs = [0] * len(graph.nodes)
    alive_bytes, first_runs, seconds = graph.resident_bytes, 0, 0.0
    timeline: list[ReplayedGraphAction] = []
    for position, action in enumerate(schedule.actions):
        node = graph.nodes[action.node]
        if action.op == "free":
            if action.node not in alive:
                raise GraphReplayError(f"action {position}: frees {node.name!r}, which is not alive")
            peak_bytes, action_seconds = alive_bytes, 0.0
            alive.discard(action.node)
            alive_bytes -= node.output_bytes
        else:
            missing = [name for name in node.inputs if index[name] not in alive]
            if missing:
                raise GraphReplayError(f"action {position}: runs {node.name!r} without its inputs {missing}")
            if action.node in alive:
                raise GraphReplayError(f"action {position}: runs {node.name!r}, whose output is alive")
            if action.node > first_runs:
                due = graph.nodes[first_runs].name
                raise GraphReplayError(
                    f"action {position}: the first run of {node.name!r} comes before that of {due!r}"
                )
            if node.once and runs[action.node]:
                raise GraphReplayError(f"action {position}: runs {node.name!r} again, which must run once")
            first_runs += action.node == first_runs
            alive.add(action.node)
            runs[action.node] += 1
            alive_bytes += node.output_bytes
            peak_bytes, action_seconds = alive_bytes + node.transient_bytes, node.seconds
        seconds += action_seconds
        timeline.append(
            ReplayedGraphAction(action=action, peak_bytes=peak_bytes, alive_bytes=alive_bytes, seconds=action_seconds)
        )
    _check_end(graph, index, alive, first_runs)
    highest = max(timeline, key=lambda entry: entry.peak_bytes)
    return GraphReplay(
        timeline=tuple(timeline),
        peak_bytes=highest.peak_bytes,
        peak_moment=highest,
        seconds=seconds,
        runs=tuple(runs),
    )


def _check_end(graph: Graph, index: dict[str, int], alive: set[int], first_runs: int) -> None:
    if first_runs < len(graph.nodes):
        raise GraphReplayError(f"the end: {graph.nodes[first_runs].name!r} has never run")
    dead = [name for name in graph.outputs if index[name] not in alive]
    if dead:
        raise GraphReplayError(f"the end: outputs {dead} are not alive")
