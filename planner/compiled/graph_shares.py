"""The shares of one budget: several graphs that a step runs in turn, each with a choice of orders, solved as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from planner.plans.graph_solving import GraphSearch, order_within
from planner.plans.refusals import NoPlan, NothingFound
from planner.steps.graph_problem import StepSurroundings, step_problem
from profiler.step_graph import StepGraph
from profiler.step_replay import StepRuns, replay_step, runs_once
from solvers.pulp_program import PulpProgram, Terms, chosen

# Of what a graph keeps when each op runs once: the bytes that are tried to be kept from its forward to its backward.
KEPT_SHARES = (0.75, 0.5, 0.25, 0.0)
SECONDS = 10.0  # for all orders of a graph, without a limit of the user's; and for the choice among them
BYTE_SCALE = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOption:
    """An order of a graph's ops, and what it takes beside the other graphs of a step.

    Attributes:
        runs: of its ops.
        seconds: of them all.
        forward_bytes, backward_bytes: the most alive while either program runs.
        kept_bytes: alive from the end of forward to the begin of backward: handed over or returned.
    """

    runs: StepRuns
    seconds: float
    forward_bytes: int
    kept_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """A graph with its options, the one that keeps least first.

    Attributes:
        options: at least one.
        returned_bytes: of the forward's outputs.
        gradient_bytes: of the gradients that its backward makes.
        loss_bytes: what a loss of its outputs takes.
    """

    options: tuple[GraphOption, ...]
    returned_bytes: int
    gradient_bytes: int
    loss_bytes: int


def options_of(step: StepGraph, room_bytes: int, search: GraphSearch, *, loss_copies: int) -> GraphOptions:
    """Orders of a graph's ops that keep more or fewer bytes while other graphs run.

    Args:
        step: the graph.
        room_bytes: the most that its programs may take.
        search: how orders are searched for; all together within its time limit.
        loss_copies: of the bytes that gradients of outputs take, what a loss takes.

    Raises:
        Infeasible, NothingFound: no order takes so little.
    """
    search = search._replace(time_limit_seconds=(search.time_limit_seconds or SECONDS) / (2 * len(KEPT_SHARES)))
    once = _option(step, runs_once(step))
    fits = max(once.forward_bytes, once.kept_bytes, once.backward_bytes) <= room_bytes
    found: dict[StepRuns, GraphOption] = {once.runs: once} if fits else {}
    refusals: list[NoPlan] = []
    for most_bytes in dict.fromkeys((room_bytes, min(room_bytes, _least_peak(step, search)))):
        for share in KEPT_SHARES:
            try:
                runs = _keeping(step, int(share * once.kept_bytes), most_bytes, search)
            except NoPlan as refusal:
                refusals.append(refusal)
            else:
                found.setdefault(runs, _option(step, runs))
    if not found:
        raise min(refusals, key=lambda refusal: refusal.minimum_budget_bytes)
    return GraphOptions(
        options=tuple(sorted(found.values(), key=lambda option: (option.kept_bytes, option.seconds))),
        returned_bytes=sum(storage.size_bytes for storage in step.storages if storage.returned),
        gradient_bytes=sum(storage.size_bytes for storage in step.storages if storage.gradient),
        loss_bytes=loss_copies * sum(storage.size_bytes for storage in step.storages if storage.of_loss),
    )


def _least_peak(step: StepGraph, search: GraphSearch) -> int:
    """The least that is known to be enough for the graph's programs, whatever it keeps between them."""
    try:
        _with_loss(step, 0, 1, search)
    except NoPlan as refusal:
        return refusal.minimum_budget_bytes
    return 1


def _keeping(step: StepGraph, kept_bytes: int, room_bytes: int, search: GraphSearch) -> StepRuns:
    """The fastest order that keeps so little, or as little as can be. For one graph the others are the loss."""
    try:
        return _with_loss(step, room_bytes - kept_bytes, room_bytes, search)
    except NoPlan as refusal:
        missing_bytes = refusal.minimum_budget_bytes - room_bytes
        if not 0 < missing_bytes <= room_bytes - kept_bytes:
            raise
        return _with_loss(step, room_bytes - kept_bytes - missing_bytes, room_bytes, search)


def _with_loss(step: StepGraph, loss_bytes: int, room_bytes: int, search: GraphSearch) -> StepRuns:
    every = frozenset(range(len(step.storages)))  # What forward returns is alive then, whoever else needs it.
    around = StepSurroundings(forward_bytes=0, backward_bytes=0, loss_bytes=loss_bytes, loss_kept=every)
    return order_within(room_bytes, step, around, step_problem(step, around), search).runs


def _option(step: StepGraph, runs: StepRuns) -> GraphOption:
    replay = replay_step(step, runs, held=False)
    again = (step.ops[ordinal].seconds for ordinal in runs.again.elements())
    return GraphOption(
        runs=runs,
        seconds=sum(op.seconds for op in step.ops) + sum(again),
        forward_bytes=replay.forward.peak_bytes,
        kept_bytes=replay.between_bytes,
        backward_bytes=replay.backward.peak_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTurns:
    """The graphs that a step runs, in the order of their forwards; a graph may come several times.

    Attributes:
        graphs: positions in the list of graphs.
        resident_bytes: alive beside them in the whole step.
    """

    graphs: tuple[int, ...]
    resident_bytes: int

    def peak_bytes(self, graphs: Sequence[GraphOptions], taken: Sequence[GraphOption]) -> int:
        """The most bytes alive at once, with an option for each graph."""
        moments = self.moments(graphs, [[(option, None)] for option in taken])
        return int(max(sum(size for _, size in moment) for moment in moments))

    def moments(
        self, graphs: Sequence[GraphOptions], weighed: Sequence[Sequence[tuple[GraphOption, Any]]]
    ) -> list[Terms]:
        """Bytes alive while each program runs, while the loss runs, and after backward.

        Args:
            graphs: all graphs.
            weighed: by graph its options, each with the variable that says whether it is taken; None where it is.

        Returns:
            A sum for each moment.
        """
        turns = [(graphs[graph], weighed[graph]) for graph in self.graphs]
        output_bytes = turns[-1][0].returned_bytes  # The loop holds it until the next step's takes its place.
        gradients = [0, *accumulate(graph.gradient_bytes for graph, _ in reversed(turns))]
        moments: list[Terms] = []
        kept: Terms = [(None, self.resident_bytes)]
        for place, (graph, options) in enumerate(turns):
            beside_bytes = graph.returned_bytes + output_bytes + gradients[len(turns) - 1 - place]
            moments.append([*kept, *((taken, option.forward_bytes) for option, taken in options), (None, output_bytes)])
            moments.append(
                [*kept, *((taken, option.backward_bytes) for option, taken in options), (None, beside_bytes)]
            )
            kept = [*kept, *((taken, option.kept_bytes) for option, taken in options)]
        moments.append([*kept, (None, turns[-1][0].loss_bytes)])
        moments.append([(None, self.resident_bytes + gradients[-1] + output_bytes)])
        return moments


def choose_options(budget_bytes: int, graphs: Sequence[GraphOptions], steps: Iterable[GraphTurns]) -> list[GraphOption]:
    """The option of each graph with which no step takes more than the budget, in the least seconds over the steps.

    One integer program: a binary variable for each option, a row for each program of each step.

    Args:
        budget_bytes: of a step.
        graphs: all graphs.
        steps: those that were seen.

    Returns:
        An option for each graph.

    Raises:
        NothingFound: no choice of the known options keeps the budget; carries the smallest that one keeps.
    """
    steps = list(steps)
    taken = _taken(budget_bytes, graphs, steps)
    if taken is not None:
        return taken
    raise NothingFound(
        minimum_budget_bytes=_least_budget(budget_bytes, graphs, steps),
        reason=f"the step runs {max(len(turns.graphs) for turns in steps)} graphs in turn, each in one of the known "
        "orders",
        solver="auto",
        budget_bytes=budget_bytes,
    )


def _taken(budget_bytes: int, graphs: Sequence[GraphOptions], steps: Sequence[GraphTurns]) -> list[GraphOption] | None:
    """The options of least seconds within a budget; None where there are none."""
    unplanned_seconds = sum(min(o.seconds for o in graph.options) for graph in graphs)
    program = PulpProgram("shares", budget_bytes, unplanned_seconds, byte_scale=BYTE_SCALE)
    taken = [[program.variable("taken", g, o) for o in range(len(graph.options))] for g, graph in enumerate(graphs)]
    for variables in taken:
        program.equal([(variable, 1.0) for variable in variables], 1.0)
    weighed = [[*zip(graph.options, variables, strict=True)] for graph, variables in zip(graphs, taken, strict=True)]
    for turns in steps:
        for moment in turns.moments(graphs, weighed):
            program.fit(moment, budget_bytes)
    program.minimise(
        (variable, option.seconds) for turns in steps for g in turns.graphs for option, variable in weighed[g]
    )
    if not program.solve(SECONDS).found:
        return None
    picked = [next(option for option, variable in options if chosen(variable)) for options in weighed]
    return picked if all(turns.peak_bytes(graphs, picked) <= budget_bytes for turns in steps) else None


def _least_budget(too_small_bytes: int, graphs: Sequence[GraphOptions], steps: Sequence[GraphTurns]) -> int:
    """The smallest budget that the known options keep, to a thousandth."""
    low, least = too_small_bytes, [graph.options[0] for graph in graphs]
    high = max(turns.peak_bytes(graphs, least) for turns in steps)
    while high - low > max(1, high * 1e-3):
        middle = (low + high) // 2
        taken = _taken(middle, graphs, steps)
        low, high = (middle, high) if taken is None else (low, max(t.peak_bytes(graphs, taken) for t in steps))
    return high
